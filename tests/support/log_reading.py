"""A fleet's log from outside: how a test gets at it, and what it says, read whole."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.requests import RequestArrived, RequestEvent
from pointsman.ports import EventLog, Link, LogEntry
from pointsman.primitives import Sequence
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.state.state import State
from pointsman_cli.discovery import FleetFile
from tests.support.waiting import eventually


@asynccontextmanager
async def link_to(fleet: FleetFile) -> AsyncIterator[Link]:
    """A link to a fleet that runs, connected."""
    settings = fleet.settings()
    async with open_link(
        settings, ScaledClock(settings.speed), HealthBoard(), name="test", user=BusUser(BusRole.READER)
    ) as link:
        await eventually(lambda: link.commands.connected)
        yield link


def life_of(entries: Iterable[LogEntry], client_request_id: str) -> list[RequestEvent]:
    """The events of the request that was sent with this id."""
    events = [entry.event for entry in entries if isinstance(entry.event, RequestEvent)]
    own = {e.request for e in events if isinstance(e, RequestArrived) and e.client_request_id == client_request_id}
    return [event for event in events if event.request in own]


async def whole_log(log: EventLog, start: Sequence = 1) -> list[LogEntry]:
    """Every entry that is kept, from `start` on, to the newest at this moment."""
    extent = await log.extent()
    found: list[LogEntry] = []
    start = max(start, extent.first)
    if extent.last < start:
        return found
    async for entry in log.read(start):
        assert isinstance(entry, LogEntry)
        found.append(entry)
        if entry.sequence >= extent.last:
            break
    return found


async def events_in(log: EventLog, start: Sequence = 1) -> list[LogEvent]:
    """What those entries say."""
    events: list[LogEvent] = []
    for entry in await whole_log(log, start):
        assert entry.event is not None, entry.problem
        events.append(entry.event)
    return events


async def folded(log: EventLog, state: State) -> State:
    """This state, with the whole log applied."""
    for entry in await whole_log(log):
        assert entry.event is not None, entry.problem
        state.apply(entry.event, entry.sequence)
    return state
