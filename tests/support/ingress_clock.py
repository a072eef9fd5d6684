"""A log as it would be had the clocks of its ingresses been wrong."""

from collections.abc import Sequence

from msgspec import structs

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.requests import RequestArrived, RequestEvent
from pointsman.contracts.subjects import subject_of
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, PoolName

WRONG_CLOCKS: tuple[EngineSeconds, ...] = (-4096.0, 4096.0)
LATER: EngineSeconds = 8192.0
"""All is dated so much later, so that no date is before 0."""


def with_ingress_clock(entries: Sequence[LogEntry], ahead: EngineSeconds) -> list[LogEntry]:
    """Commands take no time."""
    events = [entry.event for entry in entries if entry.event is not None]
    assert len(events) == len(entries)
    return [
        LogEntry.read(number, subject_of(PoolName("default"), event), encode(event))
        for number, event in enumerate((_dated(event, ahead) for event in events), start=1)
    ]


def _dated(event: LogEvent, ahead: EngineSeconds) -> LogEvent:
    at = event.at + LATER
    if isinstance(event, RequestArrived):
        return structs.replace(event, at=at, arrived_at=event.arrived_at + LATER + ahead, sent_at=at + ahead)
    if isinstance(event, RequestEvent) and event.stamp is None:
        at += ahead
    return structs.replace(event, at=at)
