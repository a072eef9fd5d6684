"""Finds a request by id, by an end of its id, by its client's id, or among the slowest, and where in the log it begins. Reads
in bounded memory."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest

from pointsman.contracts.decisions import RequestGranted, is_final_end
from pointsman.contracts.requests import RequestArrived, RequestEvent, RequestFinished
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
    prompt_tokens: Tokens = -1
    cached_tokens: Tokens = 0
    ttft: EngineSeconds = 0.0
    granted_at: EngineSeconds | None = None

    @property
    def queued_seconds(self) -> EngineSeconds | None:
        return None if self.granted_at is None else self.granted_at - self.arrived_at

    @property
    def is_late(self) -> bool:
        return self.slo_ttft is not None and self.ttft > self.slo_ttft

    def finish(self, event: RequestFinished) -> None:
        self.ttft, self.instance, self.cached_tokens = event.ttft, event.instance, event.cached_tokens
        if self.slo_ttft is None:
            self.arrived_at, self.prompt_tokens = event.at - event.e2e, event.prompt_tokens


def request_named(history: History, text: str, read: Read) -> Found:
    """Reads each entry once. Raises NotInLogError if no id matches, HistoryError if several do."""
    sent: dict[RequestId, Sequence] = {}
    ends: dict[RequestId, Sequence] = {}
    from_end = history.is_seekable and WHOLE_ID.fullmatch(text) is not None
    for entry in _from_the_end(history, read) if from_end else read(1):
        event, sequence = entry.event, entry.sequence
        if not isinstance(event, RequestEvent):
            continue
        request, arrived = event.request, isinstance(event, RequestArrived)
        if request == text and (arrived or not from_end):
            return Found(request, min(sequence, ends.get(request, sequence)))
        if isinstance(event, RequestArrived) and event.client_request_id == text and len(sent) < CANDIDATES_MAX:
            sent.setdefault(request, sequence)
        if len(ends) < CANDIDATES_MAX and (request.startswith(text) or request.endswith(text)):
            ends[request] = min(sequence, ends.get(request, sequence))
    if (whole := RequestId(text)) in ends:
        return Found(whole, ends[whole])
    found = sent or ends
    if not found:
        begins = f"; {history.begins}" if history.header.first > 1 else ""
        raise NotInLogError(f"no request {text} in this log{begins}. {HINT.format(given=fleet_as_given())}")
    if len(found) > 1:
        shown = list(found)[:CANDIDATES_SHOWN]
        more = "" if len(found) == len(shown) else ", ..."
        count = f"{len(found)} or more" if len(found) == CANDIDATES_MAX else str(len(found))
        what = "was sent with" if sent else "begins or ends the ids of"
        raise HistoryError(f"{text} {what} {count} requests: {', '.join(shown)}{more}. Type more of the one you mean.")
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
    """Answered requests, longest TTFT first. Raises HistoryError."""
    slowest = nlargest(count, _answered(entries))
    if not slowest:
        raise HistoryError("no request was answered")
    return [slow for _, _, slow in slowest]


def _answered(entries: Iterable[LogEntry]) -> Iterator[tuple[EngineSeconds, int, Slow]]:
    """TTFT, negated sequence, and request."""
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
            )
            _keep(in_flight, arrived)
        elif isinstance(event, RequestGranted):
            slow = in_flight.get(event.request)
            if slow is not None:
                slow.granted_at = event.at
            elif event.stamp is None:
                alone = Slow(
                    request=event.request,
                    sequence=entry.sequence,
                    tenant=event.tenant,
                    arrived_at=event.at,
                    granted_at=event.at,
                )
                _keep(in_flight, alone)
        elif is_final_end(event):
            slow = in_flight.pop(event.request, None)
            if slow is not None and isinstance(event, RequestFinished):
                slow.finish(event)
                yield event.ttft, -entry.sequence, slow


def _keep(in_flight: dict[RequestId, Slow], slow: Slow) -> None:
    in_flight[slow.request] = slow
    if len(in_flight) > OPEN_MAX:
        in_flight.pop(next(iter(in_flight)))
