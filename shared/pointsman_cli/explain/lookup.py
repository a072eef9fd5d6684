"""Finds a request by id, by an end of its id, or among the slowest. Reads the log once, in bounded memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappush, heapreplace

from pointsman.contracts.decisions import RequestEnd, RequestGranted
from pointsman.contracts.requests import RequestArrived, RequestEvent, RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Seconds, Tenant, Tokens
from pointsman_cli.history.errors import HistoryError

CANDIDATES_MAX = 100
CANDIDATES_SHOWN = 8
OPEN_MAX = 100_000
HINT = (
    "The id is the x-request-id of the answer. `--slowest 10` lists the slowest, `pointsman tap --since 1 --until now` "
    "shows all."
)


@dataclass(slots=True)
class Slow:
    request: RequestId
    tenant: Tenant
    instance: InstanceId
    arrived_at: Seconds
    slo_ttft: Seconds
    prompt_tokens: Tokens
    cached_tokens: Tokens = 0
    ttft: Seconds = 0.0
    granted_at: Seconds | None = None

    @property
    def queued_seconds(self) -> Seconds | None:
        return None if self.granted_at is None else self.granted_at - self.arrived_at

    @property
    def late_seconds(self) -> Seconds:
        return self.ttft - self.slo_ttft


def request_named(entries: Iterable[LogEntry], text: str) -> RequestId:
    """Raises HistoryError if no id or several ids match."""
    found: dict[RequestId, None] = {}
    for request in _request_ids(entries):
        if request == text:
            return request
        if len(found) < CANDIDATES_MAX and (request.startswith(text) or request.endswith(text)):
            found[request] = None
    if not found:
        msg = f"no request {text} in this log.\n{HINT}"
        raise HistoryError(msg)
    if len(found) > 1:
        shown = list(found)[:CANDIDATES_SHOWN]
        more = "" if len(found) == len(shown) else ", ..."
        count = f"{len(found)} or more" if len(found) == CANDIDATES_MAX else str(len(found))
        msg = f"{text} begins or ends the ids of {count} requests: {', '.join(shown)}{more}. Type more of the one you mean."
        raise HistoryError(msg)
    return next(iter(found))


def slowest_requests(entries: Iterable[LogEntry], count: int) -> list[Slow]:
    """Answered requests, longest TTFT first. Raises HistoryError."""
    in_flight: dict[RequestId, Slow] = {}
    heap: list[tuple[Seconds, int, Slow]] = []
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestArrived):
            in_flight[event.request] = _slow(event)
            if len(in_flight) > OPEN_MAX:
                in_flight.pop(next(iter(in_flight)))
        elif isinstance(event, RequestGranted):
            if event.request in in_flight:
                in_flight[event.request].granted_at = event.at
        elif isinstance(event, RequestEnd):
            slow = in_flight.pop(event.request, None)
            if slow is not None and isinstance(event, RequestFinished):
                _keep(heap, count, (event.ttft, -entry.sequence, _answered(slow, event)))
    if not heap:
        msg = "no request was answered in this log"
        raise HistoryError(msg)
    return [slow for _, _, slow in sorted(heap, reverse=True)]


def _request_ids(entries: Iterable[LogEntry]) -> Iterator[RequestId]:
    for entry in entries:
        if isinstance(entry.event, RequestEvent):
            yield entry.event.request


def _slow(event: RequestArrived) -> Slow:
    return Slow(
        request=event.request,
        tenant=event.tenant,
        instance=InstanceId(""),
        arrived_at=event.arrived_at,
        slo_ttft=event.slo_ttft,
        prompt_tokens=event.prompt_tokens,
    )


def _answered(slow: Slow, event: RequestFinished) -> Slow:
    slow.ttft, slow.instance, slow.cached_tokens = event.ttft, event.instance, event.cached_tokens
    return slow


def _keep(heap: list[tuple[Seconds, int, Slow]], count: int, item: tuple[Seconds, int, Slow]) -> None:
    if len(heap) < count:
        heappush(heap, item)
    elif item > heap[0]:
        heapreplace(heap, item)
