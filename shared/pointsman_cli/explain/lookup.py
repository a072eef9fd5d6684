"""Which request is meant: by its id or a part of it, the last one, or the slowest.

The id of a request is the `x-request-id` of its answer. `tap` shows the end of long ones, so an end is as good as a
beginning. One reading of the log finds everything; what is kept meanwhile is bounded by CANDIDATES_MAX requests, or by
those that are under way.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappush, heapreplace

from pointsman.contracts.decisions import RequestEnd, RequestGranted
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestEvent,
    RequestFinished,
)
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Seconds, Tenant, Tokens
from pointsman_cli.history.errors import HistoryError

CANDIDATES_MAX = 100
CANDIDATES_SHOWN = 8
OPEN_MAX = 100_000
"""Requests under way that are remembered while the slowest are looked for; the oldest are forgotten first."""

HINT = (
    "The id is the x-request-id of the answer. `--last` takes the last request that ended, `--slowest 10` lists those "
    "that waited longest, `pointsman tap --all --no-follow` shows all."
)


@dataclass(slots=True)
class Slow:
    """A request that was answered, and where its time to first token went."""

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
        """From arrival to the last grant."""
        return None if self.granted_at is None else self.granted_at - self.arrived_at

    @property
    def late_seconds(self) -> Seconds:
        return self.ttft - self.slo_ttft


def request_named(entries: Iterable[LogEntry], text: str) -> RequestId:
    """The request of this id, else the only one whose id begins or ends so. Raises HistoryError."""
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


def last_request(entries: Iterable[LogEntry]) -> RequestId:
    """The one that ended last. Raises HistoryError where none did."""
    last: RequestId | None = None
    for entry in entries:
        if isinstance(entry.event, RequestEnd):
            last = entry.event.request
    if last is None:
        msg = "no request has ended in this log"
        raise HistoryError(msg)
    return last


def slowest_requests(entries: Iterable[LogEntry], count: int) -> list[Slow]:
    """The answered requests with the longest time to first token, slowest first. Raises HistoryError where there are none."""
    underway: dict[RequestId, Slow] = {}
    heap: list[tuple[Seconds, int, Slow]] = []
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestArrived):
            underway[event.request] = _slow(event)
            if len(underway) > OPEN_MAX:
                underway.pop(next(iter(underway)))
        elif isinstance(event, RequestGranted):
            if event.request in underway:
                underway[event.request].granted_at = event.at
        elif isinstance(event, RequestEnd):
            slow = underway.pop(event.request, None)
            if slow is not None and isinstance(event, RequestFinished):
                _keep(heap, count, (event.ttft, -entry.sequence, _answered(slow, event)))
    if not heap:
        msg = "no request was answered in this log"
        raise HistoryError(msg)
    return [slow for _, _, slow in sorted(heap, reverse=True)]


def entries_of(entries: Iterable[LogEntry], request: RequestId) -> Iterator[LogEntry]:
    """What the log says of one request."""
    for entry in entries:
        if isinstance(entry.event, RequestEvent) and entry.event.request == request:
            yield entry


def first_token_of(event: object) -> bool:
    """Whether a first token was seen; the leader's assumption is none."""
    return isinstance(event, PrefillFinished) and event.stamp is None


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
