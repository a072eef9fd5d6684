"""Outcomes (as in `attainment`), placed prefill work and answers of the last `window_s` engine seconds; at most
RECORDS_MAX of each. The window is of the leader's time: what ingresses date counts between the arrivals and placements
around it in the log, so that an ingress with a wrong clock neither hides the outcomes of others nor its own."""

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.trackers.base import OutcomeTracker
from pointsman.state.workload import Request, Stage

RECORDS_MAX = 20_000
PREFIX_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    at: EngineSeconds
    on_time: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    total: int = 0
    on_time: int = 0
    refused: int = 0

    @property
    def attainment(self) -> float:
        return self.on_time / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """One placed request. `seconds`: by the uncorrected cost model; `prefix`: its family."""

    at: EngineSeconds
    arrived_at: EngineSeconds
    slo_ttft: EngineSeconds
    instance: InstanceId
    seconds: EngineSeconds
    uncached_tokens: Tokens
    prompt_tokens: Tokens
    prefix: BlockKey | None


@dataclass(frozen=True, slots=True)
class Answer:
    """`in_time`: its time between tokens (TBT, else TPOT) met its objective. `refused`: as it would have missed it."""

    at: EngineSeconds
    in_time: bool
    slo_tpot: EngineSeconds
    prompt_tokens: Tokens
    tokens: Tokens = 0
    refused: bool = False


class ServiceWindow(OutcomeTracker):
    def __init__(self, window_s: EngineSeconds) -> None:
        self._window_s = window_s
        self._outcomes = _Recent[Outcome](window_s)
        self._prefills: OrderedDict[RequestId, Prefill] = OrderedDict()
        self._answers = _Recent[Answer](window_s)
        self.first_at: EngineSeconds = float("inf")
        """Of the first arrival."""
        self.last_arrival_at: EngineSeconds = float("-inf")

    @property
    @override
    def history_s(self) -> EngineSeconds:
        return self._window_s

    @override
    def resumed(self, at: EngineSeconds) -> None:
        """As if a request had arrived: an instance is not given up early for want of arrivals."""
        self.first_at = self.last_arrival_at = at

    def outcomes(self, since: EngineSeconds) -> Outcomes:
        found = self._outcomes.since(since)
        return Outcomes(len(found), sum(each.on_time for each in found), sum(each.refused for each in found))

    def prefills(self, since: EngineSeconds) -> list[Prefill]:
        """In order, each at its last placement."""
        return [prefill for prefill in self._prefills.values() if prefill.at >= since]

    def answers(self, since: EngineSeconds) -> list[Answer]:
        """Of two tokens and more."""
        return self._answers.since(since)

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self.first_at = min(self.first_at, at)
        self.last_arrival_at = at
        self._reached(at)

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._reached(at)
        keys = request.keys
        self._prefills.pop(request.id, None)
        self._prefills[request.id] = Prefill(
            at=at,
            arrived_at=request.arrived_at,
            slo_ttft=request.slo_ttft,
            instance=request.instance,
            seconds=request.prefill_seconds,
            uncached_tokens=request.uncached_tokens,
            prompt_tokens=request.prompt_tokens,
            prefix=keys[min(len(keys), PREFIX_BLOCKS) - 1] if keys else None,
        )
        while self._prefills:
            oldest = next(iter(self._prefills.values()))
            if oldest.at >= at - self._window_s and len(self._prefills) <= RECORDS_MAX:
                break
            self._prefills.popitem(last=False)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._prefills.pop(request.id, None)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if request.stage is Stage.PENDING:
            self._prefills.pop(request.id, None)
        if finished is not None and finished.completion_tokens > 1:
            between = finished.tbt_p90 or finished.tpot
            self._answered(request, at, in_time=between <= request.slo_tpot, tokens=finished.completion_tokens)
        elif finished is None and request.awaits_decoder:
            self._answered(request, at, refused=True)
        super().ended(request, at, finished)

    @override
    def refused(self, request: Request, at: EngineSeconds, reason: str) -> None:
        if reason == RejectReason.SLO_TPOT:
            self._answered(request, at, refused=True)
        super().refused(request, at, reason)

    def _answered(
        self, request: Request, at: EngineSeconds, *, in_time: bool = False, tokens: Tokens = 0, refused: bool = False
    ) -> None:
        self._answers.add(Answer(at, in_time, request.slo_tpot, request.prompt_tokens, tokens, refused))

    @override
    def outcome(self, request: Request, at: EngineSeconds, *, on_time: bool, refused: bool = False) -> None:
        self._outcomes.add(Outcome(at, on_time, refused))

    def _reached(self, at: EngineSeconds) -> None:
        self._outcomes.reached(at)
        self._answers.reached(at)


Record = TypeVar("Record", Outcome, Answer)


class _Recent(Generic[Record]):
    def __init__(self, window_s: EngineSeconds) -> None:
        self._window_s = window_s
        self._records: deque[Record] = deque(maxlen=RECORDS_MAX)
        self._undated = 0
        """Newest records behind the last time of the leader."""
        self._leader_at: EngineSeconds = float("-inf")

    def add(self, record: Record) -> None:
        self._records.append(replace(record, at=max(record.at, self._leader_at)))
        self._undated = min(self._undated + 1, len(self._records))

    def reached(self, at: EngineSeconds) -> None:
        """What the leader's clock shows."""
        for place in range(-self._undated, 0):
            if self._records[place].at > at:
                self._records[place] = replace(self._records[place], at=at)
        self._leader_at, self._undated = at, 0
        while self._records and self._records[0].at < at - self._window_s:
            self._records.popleft()

    def since(self, at: EngineSeconds) -> list[Record]:
        return [record for record in self._records if record.at >= at]
