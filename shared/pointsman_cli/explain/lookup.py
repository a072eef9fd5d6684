"""Finds a request by id, by an end of its id, by its client's id, or among the slowest, and where in the log it begins. Reads
in bounded memory."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest

from pointsman.analysis.placed_alone import is_told_again
from pointsman.contracts.decisions import RequestEnd, RequestGranted, counts_as_end, is_final_end
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestEvent, RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence, Tenant, Tokens
from pointsman.state.workload import NO_INSTANCE
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.history.entries import History, HistoryError, NotInLogError

CANDIDATES_MAX = 100
CANDIDATES_SHOWN = 8
OPEN_MAX = 100_000
RECENT_ENTRIES = 50_000
WHOLE_ID = re.compile(r"[0-9a-f]{24}")
"""As an ingress makes them."""
HINT = (
    "The id is the x-pointsman-request-id of the answer, or its x-request-id. `--slowest 10` lists the slowest, "
    "`pointsman tap{given} --since 1 --until now` shows all of a running fleet."
)

Read = Callable[[Sequence], Iterable[LogEntry]]
"""Entries of the log from one on."""


@dataclass(frozen=True, slots=True)
class Found:
    """`sequence`: of its first entry."""

    request: RequestId
    sequence: Sequence


@dataclass(slots=True, kw_only=True)
class Slow:
    request: RequestId
    sequence: Sequence
    tenant: Tenant
    instance: InstanceId = NO_INSTANCE
    arrived_at: EngineSeconds
    slo_ttft: EngineSeconds | None = None
    """None where the log has no arrival: an ingress placed it alone."""
    clock_offset: EngineSeconds = 0.0
    prompt_tokens: Tokens = -1
    cached_tokens: Tokens = 0
    ttft: EngineSeconds | None = None
    waited: EngineSeconds = 0.0
    """For its first token, or without one until its end."""
    end: RequestEnd | None = None
    granted_at: EngineSeconds | None = None

    @property
    def queued_seconds(self) -> EngineSeconds | None:
        return None if self.granted_at is None else self.granted_at - self.arrived_at

    @property
    def is_late(self) -> bool:
        return self.slo_ttft is not None and self.waited > self.slo_ttft

    def grant(self, event: RequestGranted) -> None:
        if self.granted_at is None or not is_told_again(event, self.instance):
            self.granted_at, self.instance = event.at, event.instance

    def finish(self, event: RequestEnd) -> None:
        self.end = event
        if isinstance(event, RequestFinished):
            self.ttft, self.instance, self.cached_tokens = event.ttft, event.instance, event.cached_tokens
            if self.slo_ttft is None:
                self.arrived_at, self.prompt_tokens = event.at - event.e2e, event.prompt_tokens
        ended_at = event.at if event.stamp is not None else event.at + self.clock_offset
        self.waited = max(0.0, ended_at - self.arrived_at) if self.ttft is None else self.ttft


def request_named(history: History, text: str, read: Read) -> Found:
    """Reads each entry once. Raises NotInLogError if no id matches, HistoryError if several do."""
    matches = _Matches(RequestId(text))
    if history.is_seekable and WHOLE_ID.fullmatch(text):
        for entry in _from_the_end(history, read):
            if matches.note(entry) and isinstance(entry.event, RequestArrived):  # what came before it is in this part
                break
    else:
        for entry in read(1):
            if matches.note(entry):
                break
    return matches.only(history)


class _Matches:
    """Requests that a text may name, from entries in any order, with the first entry of each."""

    def __init__(self, text: RequestId) -> None:
        self._text = text
        self._sent: dict[RequestId, Sequence] = {}
        """By their client, under this id."""
        self._alike: dict[RequestId, Sequence] = {}
        """Whose id is the text, or begins or ends with it."""

    def note(self, entry: LogEntry) -> bool:
        """Whether the entry is of the request with this very id."""
        event, text = entry.event, self._text
        if not isinstance(event, RequestEvent):
            return False
        request = event.request
        if isinstance(event, RequestArrived) and event.client_request_id == text and len(self._sent) < CANDIDATES_MAX:
            self._sent.setdefault(request, entry.sequence)
        is_it = request == text
        if is_it or (len(self._alike) < CANDIDATES_MAX and (request.startswith(text) or request.endswith(text))):
            self._alike[request] = min(entry.sequence, self._alike.get(request, entry.sequence))
        return is_it

    def only(self, history: History) -> Found:
        """Raises NotInLogError, HistoryError."""
        text = self._text
        if text in self._alike:
            return Found(text, self._alike[text])
        found = self._sent or self._alike
        if not found:
            begins = f"; {history.begins}" if history.header.first > 1 else ""
            raise NotInLogError(f"no request {text} in this log{begins}. {HINT.format(given=fleet_as_given())}")
        if len(found) > 1:
            shown = list(found)[:CANDIDATES_SHOWN]
            more = "" if len(found) == len(shown) else ", ..."
            count = f"{len(found)} or more" if len(found) == CANDIDATES_MAX else str(len(found))
            what = "was sent with" if self._sent else "begins or ends the ids of"
            raise HistoryError(
                f"{text} {what} {count} requests: {', '.join(shown)}{more}. Type more of the one you mean."
            )
        return Found(*next(iter(found.items())))


def _from_the_end(history: History, read: Read) -> Iterator[LogEntry]:
    """Parts of the log, the last one first, each in its order: most requests that are asked for are recent."""
    last, count = history.header.last, RECENT_ENTRIES
    while last >= max(1, history.header.first):
        first = max(1, last - count + 1)
        for entry in read(first):
            if entry.sequence > last:
                break
            yield entry
        last, count = first - 1, 4 * count


def slowest_requests(entries: Iterable[LogEntry], count: int) -> list[Slow]:
    """Requests that have ended, however, longest wait first. Raises HistoryError."""
    slowest = nlargest(count, _ended(entries))
    if not slowest:
        raise HistoryError("no request has ended")
    return [slow for _, _, slow in slowest]


def _ended(entries: Iterable[LogEntry]) -> Iterator[tuple[EngineSeconds, int, Slow]]:
    """Seconds waited, negated sequence, and request."""
    in_flight: dict[RequestId, Slow] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestArrived):
            placed = in_flight.get(event.request)  # by its ingress, whose grant may come before the arrival
            arrived = Slow(
                request=event.request,
                sequence=placed.sequence if placed is not None else entry.sequence,
                tenant=event.tenant,
                arrived_at=event.arrived_at + event.clock_offset,
                slo_ttft=event.slo_ttft,
                prompt_tokens=event.prompt_tokens,
                granted_at=placed.granted_at if placed is not None else None,
                instance=placed.instance if placed is not None else NO_INSTANCE,
                clock_offset=event.clock_offset,
            )
            _keep(in_flight, arrived)
        elif isinstance(event, RequestGranted):
            slow = in_flight.get(event.request)
            if slow is not None:
                slow.grant(event)
            elif event.stamp is None:
                alone = Slow(
                    request=event.request,
                    sequence=entry.sequence,
                    tenant=event.tenant,
                    instance=event.instance,
                    arrived_at=event.at,
                    granted_at=event.at,
                )
                _keep(in_flight, alone)
        elif isinstance(event, PrefillFinished):
            if event.stamp is None and (slow := in_flight.get(event.request)) is not None and slow.ttft is None:
                slow.ttft = event.ttft
        elif isinstance(event, RequestEnd) and (slow := in_flight.get(event.request)) is not None:
            if counts_as_end(event, slow.end):
                slow.finish(event)
            if is_final_end(event):
                del in_flight[event.request]
                yield slow.waited, -entry.sequence, slow
    yield from ((slow.waited, -slow.sequence, slow) for slow in in_flight.values() if slow.end is not None)


def _keep(in_flight: dict[RequestId, Slow], slow: Slow) -> None:
    in_flight[slow.request] = slow
    if len(in_flight) > OPEN_MAX:
        in_flight.pop(next(iter(in_flight)))
