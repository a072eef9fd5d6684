"""A log of one ingress, told as if a second one had taken every other request, and had hung twice."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestEvent, RequestFinished
from pointsman.contracts.subjects import subject_of
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, PoolName, RequestId
from tests.support.events import given_up

INGRESS = "ingress-2"
HANGS: tuple[tuple[EngineSeconds, EngineSeconds], ...] = ((8.0, 18.0), (20.0, 30.0))
SILENT_SECONDS = 3.0
"""Until the leader gives one of its requests up."""


def with_hung_ingress(entries: Sequence[LogEntry], *at_its_end: LogEvent) -> list[LogEntry]:
    """What the ingress would have written while it hung comes when it goes on; nothing arrives there meanwhile."""
    arrivals = {e.event.request: e.event.arrived_at for e in entries if isinstance(e.event, RequestArrived)}
    its_own = {request for request in arrivals if int(request.removeprefix("r-")) % 2}
    events = [event for entry in entries for event in _told(entry.event, arrivals, its_own)]
    lost = [_given_up(events, number) for number in range(len(HANGS))]
    told = sorted([*lost, *events, *at_its_end], key=lambda event: event.at)
    return [
        LogEntry.read(number, subject_of(PoolName("default"), event), encode(event))
        for number, event in enumerate(told, start=1)
    ]


def _told(
    event: LogEvent | None, arrivals: dict[RequestId, EngineSeconds], its_own: set[RequestId]
) -> Iterator[LogEvent]:
    if event is None:
        return
    if not isinstance(event, RequestEvent) or event.request not in its_own:
        yield event
        return
    arrived_at = arrivals[event.request]
    if _noticed_at(arrived_at) != arrived_at:
        return
    match event:
        case RequestArrived():
            yield replace(event, ingress=INGRESS)
        case PrefillFinished():
            at = _noticed_at(event.at)
            yield replace(event, at=at, ttft=at - arrived_at, prefill=event.prefill + at - event.at)
        case RequestFinished():
            ttft = _noticed_at(arrived_at + event.ttft) - arrived_at
            yield replace(event, at=_noticed_at(event.at), ttft=ttft)
        case _:
            yield event if event.stamp is not None else replace(event, at=_noticed_at(event.at))


def _given_up(events: Sequence[LogEvent], number: int) -> LogEvent:
    begun, ended = HANGS[number]
    late = [event for event in events if isinstance(event, RequestFinished) and event.at == ended]
    latest = max(late, key=lambda event: event.ttft)
    return given_up(latest.request, at=begun + SILENT_SECONDS, instance=latest.instance, number=10_000 + number)


def _noticed_at(at: EngineSeconds) -> EngineSeconds:
    return next((ended for begun, ended in HANGS if begun <= at < ended), at)
