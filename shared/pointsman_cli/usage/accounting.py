"""Counts requests, tokens and engine seconds per tenant, model and day, in one pass over a log. docs/data.md#usage
defines each number. Tokens are the engines' own counts, of streams that broke off the ingress's; seconds are engine time. Each
duration is of one clock: the ingress's where events carry it, else the leader's, to which the times of ingresses are
moved."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Literal

import msgspec

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestRejected,
    counts_as_end,
    may_come_again,
)
from pointsman.contracts.envelope import is_fenced
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    is_given_up,
)
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tenant, Term, Tokens, wall_time_of
from pointsman.state.state import State
from pointsman.state.workload import NO_INSTANCE, Request, Stage
from pointsman_cli.history.time_options import Moment

Dimension = Literal["tenant", "model", "day"]
DIMENSIONS: tuple[Dimension, ...] = ("tenant", "model", "day")
GROUPS_MAX = 100_000
NO_TENANT = Tenant("")
ENDED_MAX = 100_000
"""Ended requests that are remembered, for second ends and for grants that the log has after the end."""
LAST_DAY_SECONDS = 250_000_000_000.0


class TooManyGroupsError(ValueError):
    """More rows than GROUPS_MAX."""


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not asked for. `tenant` is empty for requests without a name."""

    tenant: Tenant | None = None
    model: str | None = None
    day: date | None = None


class Usage(msgspec.Struct, kw_only=True):
    requests: int = 0
    finished: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    computed_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    output_tokens: Tokens = 0
    prefill_seconds: EngineSeconds = 0.0
    decode_seconds: EngineSeconds = 0.0
    uncounted: int = 0
    """Finished, but the engine reported no tokens."""

    @property
    def engine_seconds(self) -> EngineSeconds:
        return self.prefill_seconds + self.decode_seconds

    def add(self, other: "Usage", sign: Literal[1, -1] = 1) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


@dataclass(slots=True)
class _Request:
    tenant: Tenant = NO_TENANT
    model: str = ""
    prompt_tokens: Tokens = 0
    arrived: bool = False
    granted: bool = False
    granted_at: EngineSeconds | None = None
    """None while it is on no engine."""
    instance: InstanceId = NO_INSTANCE
    """Of the grant; its engine gets the request at once, unless `fetches`."""
    fetches: bool = False
    first_token_at: EngineSeconds | None = None
    timed: bool = False
    """Its ingress has seen that first token."""
    ahead: EngineSeconds = 0.0
    """The clock of its ingress, against its leader's. Until its ingress has timed something, the way to its leader counts as
    if that clock were behind."""
    prefill_seconds: EngineSeconds = 0.0
    decode_seconds: EngineSeconds = 0.0

    def arrive(self, event: RequestArrived, model: str) -> None:
        self.tenant, self.model, self.arrived = event.tenant, model, True
        self.prompt_tokens = max(0, event.prompt_tokens)
        self.ahead = event.arrived_at + event.held_up - event.at

    def enter_engine(self, event: RequestGranted | RequestHandedOver) -> None:
        """Its ingress may report a grant again."""
        self.granted = True
        if self.granted_at is None:
            self.granted_at, self.instance = self.leader_time(event), event.instance
            self.fetches = isinstance(event, RequestGranted) and bool(event.fetch_from)

    def first_token(self, event: PrefillFinished) -> None:
        if self.first_token_at is not None:
            return
        self.timed = event.stamp is None
        sent_at = None if self.fetches or event.instance != self.instance else self.granted_at
        if self.timed and sent_at is not None:
            self.ahead = event.at - event.prefill - sent_at
        self.first_token_at = self.leader_time(event)

    def leave_engine(self, event: LogEvent) -> None:
        if self.granted_at is None:
            return
        at = self.leader_time(event)
        if isinstance(event, RequestFinished) and self.timed and self.first_token_at is not None:
            at = self.first_token_at + event.e2e - event.ttft
        first_token_at = at if self.first_token_at is None else min(self.first_token_at, at)
        self.prefill_seconds += max(0.0, first_token_at - self.granted_at)
        self.decode_seconds += max(0.0, at - max(first_token_at, self.granted_at))
        self.granted_at, self.first_token_at, self.timed = None, None, False

    def leader_time(self, event: LogEvent) -> EngineSeconds:
        return event.at if event.stamp is not None else event.at - self.ahead


@dataclass(frozen=True, slots=True)
class _Ended:
    """A leader may write late: an arrival and a grant that the log has after the end still count."""

    event: RequestEnd
    request: _Request
    counting: bool
    in_flight: _Request | None = None
    """As it was before its leader gave it up; its ingress may still report its end."""


class UsageAccount:
    """Fed with every entry of a log in order."""

    def __init__(self, speed: float, by: tuple[Dimension, ...] = DIMENSIONS) -> None:
        self.by = by
        self.groups: dict[Group, Usage] = {}
        self.unattributed = 0
        """Requests whose tenant is not in the log: they are older, or of a version that did not write it."""
        self._speed = speed
        self._model = ""
        self._term = Term(0)
        self._requests: dict[RequestId, _Request] = {}
        self._ended: OrderedDict[RequestId, _Ended] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def total(self) -> Usage:
        total = Usage()
        for usage in self.groups.values():
            total.add(usage)
        return total

    def rows(self) -> list[tuple[Group, Usage]]:
        return sorted(self.groups.items(), key=lambda row: (str(row[0].day), row[0].tenant or "", row[0].model or ""))

    def begin(self, state: State) -> None:
        """What a checkpoint says of the requests in flight."""
        self._term = state.term
        for instance in state.fleet.instances:
            self._model = self._model or instance.model
        for known in state.workload.requests.values():
            self._requests[known.id] = _Request(
                tenant=known.tenant,
                model=known.adapter or self._model,
                prompt_tokens=known.prompt_tokens,
                arrived=True,
                granted_at=known.granted_at or None,
                granted=bool(known.granted_at),
                instance=known.instance,
                fetches=bool(known.fetch_from),
                first_token_at=_first_token_at(known),
                timed=known.stage is Stage.DECODING and known.streaming and not known.prefilled_by,
            )

    def read(self, entries: Iterable[LogEntry], *, since: Moment = Moment()) -> None:  # noqa: B008 - immutable
        """Counts requests that ended at `since` or later. Raises TooManyGroupsError."""
        counting, reached = since == Moment(), since.reached()
        for entry in entries:
            counting = counting or reached(entry)
            if entry.event is not None and not is_fenced(entry.event.stamp, self._term):
                self._apply(entry.event, counting=counting)

    def _apply(self, event: LogEvent, *, counting: bool) -> None:
        match event:
            case LeaderElected():
                self._term = max(self._term, event.term)
            case InstanceJoined():
                self._model = event.model or self._model
            case RequestArrived():
                self._arrive(event)
            case RequestGranted():
                self._grant(event)
            case RequestHandedOver():
                self._hand_over(event)
            case PrefillFinished():
                if (request := self._in_flight(event.request)) is not None:
                    request.first_token(event)
            case RequestAttemptFailed():
                self._leave_engine(event.request, event)
            case RequestMigrated() if event.rebound:
                self._leave_engine(event.request, event)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                self._end(event, counting=counting)
            case _:
                pass

    def _arrive(self, event: RequestArrived) -> None:
        before = self._ended.get(event.instead_of)
        if before is not None and may_come_again(before.event) and before.request.tenant == event.tenant:
            self._count(before, -1)  # it is the same request
            self._ended[event.instead_of] = replace(before, counting=False)
        ended = self._ended.get(event.request)
        if ended is None:
            self._requests.setdefault(event.request, _Request()).arrive(event, event.adapter or self._model)
        elif not ended.request.arrived:
            self._count(ended, -1)
            ended.request.arrive(event, event.adapter or self._model)
            self._count(ended, 1)

    def _grant(self, event: RequestGranted) -> None:
        ended = self._ended.get(event.request)
        if ended is None:
            request = self._requests.setdefault(event.request, _Request(model=self._model))
            request.enter_engine(event)
            if not request.arrived and (event.tenant or event.adapter):
                request.tenant, request.model, request.arrived = event.tenant, event.adapter or self._model, True
        elif not ended.request.granted:
            self._count(ended, -1)
            ended.request.enter_engine(event)
            ended.request.leave_engine(ended.event)
            self._count(ended, 1)

    def _hand_over(self, event: RequestHandedOver) -> None:
        """The prefill ends here; what follows, on the instance that decodes, is decoding."""
        if (request := self._requests.get(event.request)) is not None:
            request.leave_engine(event)
            request.enter_engine(event)
            request.first_token_at = request.granted_at

    def _in_flight(self, name: RequestId) -> _Request | None:
        ended = self._ended.get(name)
        return self._requests.get(name) if ended is None else ended.in_flight

    def _leave_engine(self, name: RequestId, event: LogEvent) -> None:
        if (request := self._requests.get(name)) is not None:
            request.leave_engine(event)

    def _end(self, event: RequestEnd, *, counting: bool) -> None:
        earlier = self._ended.get(event.request)
        if not counts_as_end(event, earlier.event if earlier is not None else None):
            return
        if earlier is not None:
            self._count(earlier, -1)
        request = self._in_flight(event.request) or _Request(model=self._model)
        self._requests.pop(event.request, None)
        in_flight = replace(request) if is_given_up(event) else None
        request.leave_engine(event)
        ended = self._ended[event.request] = _Ended(event, request, counting, in_flight)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self._count(ended, 1)

    def _count(self, ended: _Ended, sign: Literal[1, -1]) -> None:
        if not ended.counting:
            return
        self.unattributed += sign * (not ended.request.arrived)
        group = self._group_of(ended)
        usage = self.groups.get(group)
        if usage is None:
            if len(self.groups) == GROUPS_MAX:
                raise TooManyGroupsError(f"there are more than {GROUPS_MAX:,} rows; ask for fewer with --by or --since")
            usage = self.groups[group] = Usage()
        usage.add(_usage_of(ended.event, ended.request), sign)
        if not usage.requests:
            del self.groups[group]

    def _group_of(self, ended: _Ended) -> Group:
        seconds = min(max(0.0, wall_time_of(ended.request.leader_time(ended.event), self._speed)), LAST_DAY_SECONDS)
        return Group(
            tenant=ended.request.tenant if "tenant" in self.by else None,
            model=ended.request.model if "model" in self.by else None,
            day=datetime.fromtimestamp(seconds, UTC).date() if "day" in self.by else None,
        )


def _first_token_at(known: Request) -> EngineSeconds | None:
    """Of a request that has it already; when it came, only its prediction tells."""
    if known.stage not in (Stage.HANDED_OVER, Stage.DECODING):
        return None
    return known.granted_at + known.engine_seconds + known.load_seconds


def _usage_of(event: RequestEnd, request: _Request) -> Usage:
    """If the engine reported no prompt tokens, those of the arrival count as computed."""
    usage = Usage(requests=1, prefill_seconds=request.prefill_seconds, decode_seconds=request.decode_seconds)
    match event:
        case RequestFinished():
            prompt = event.prompt_tokens if event.prompt_tokens >= 0 else request.prompt_tokens
            usage.finished = 1
            usage.cached_tokens = max(0, event.cached_tokens)
            usage.computed_tokens = max(0, prompt - usage.cached_tokens)
            usage.output_tokens = max(0, event.completion_tokens)
            usage.uncounted = int(event.prompt_tokens < 0 or event.completion_tokens < 0)
        case RequestRejected():
            usage.rejected = 1
        case RequestFailed():
            usage.failed = 1
            usage.output_tokens = max(0, event.output_tokens)
        case RequestCancelled():
            usage.cancelled = 1
            usage.output_tokens = max(0, event.output_tokens)
    return usage
