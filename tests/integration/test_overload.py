"""A leader whose log does not keep up, or that does not itself: what it refuses, what it goes on with, what the log tells."""

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import MigrateRequests, MigrationAnswered, RouteGranted, RouteRejected
from pointsman.contracts.decisions import LeaderElected, RequestsRefused
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import command_subject
from pointsman.primitives import PoolName, WallSeconds
from pointsman.simulation.replay import verify
from pointsman_lab.memory.log import MemoryBroker, MemoryLog
from tests.support.events import finished, first_token, joined, route
from tests.support.log_reading import events_in, whole_log
from tests.support.scheduling import running_scheduler
from tests.support.waiting import eventually

POOL = PoolName("default")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every log says of its window."""
    now = [0.0]
    monkeypatch.setattr(MemoryLog, "write_load", property(lambda _log: now[0]))
    return now


async def test_new_requests_are_refused_unwritten_known_ones_go_on_and_the_log_counts_the_refused(
    load: list[float],
) -> None:
    broker, clock = MemoryBroker(POOL), ScaledClock()
    client = broker.client(name="test", clock=clock)
    await client.log.append(joined("engine-1", at=clock.now()))

    async def ask(request: str) -> object:
        command = route(request, [1, 2], arrived_at=clock.now())
        return await client.commands.request(command_subject(POOL, "route"), command, timeout=WallSeconds(5.0))

    async with running_scheduler(broker.client(name="s", clock=clock), clock, name="s") as service:
        await eventually(lambda: service.leading)
        assert isinstance(await ask("before"), RouteGranted)
        load[0] = 0.6
        written = broker.extent.last
        refused = [await ask(f"new-{number}") for number in range(3)]
        again = await ask("before")
        after = broker.extent.last
        plan = MigrateRequests(plan="p", term=service.leading.term, as_of=service.state.sequence, moves=[], policy="x")  # type: ignore[union-attr]
        answered = await client.commands.request(command_subject(POOL, "migrate"), plan, timeout=WallSeconds(5.0))
        await client.log.append(first_token("before", "engine-1", at=clock.now()))
        await client.log.append(finished("before", "engine-1", at=clock.now()))
        load[0] = 0.0
        assert isinstance(await ask("later"), RouteGranted)

        async def told() -> bool:
            return any(isinstance(event, RequestsRefused) for event in await events_in(client.log))

        await eventually(told)
        events = await events_in(client.log)
        entries = await whole_log(client.log)

    assert written == after
    assert isinstance(again, RouteGranted)
    for answer in refused:
        assert isinstance(answer, RouteRejected)
        assert (answer.status, answer.reason) == (503, "log_overloaded")
        assert answer.retry_after > 0
    assert isinstance(answered, MigrationAnswered)
    assert answered.refusal == "log_busy"
    assert [(event.count, event.reason) for event in events if isinstance(event, RequestsRefused)] == [
        (3, "log_overloaded")
    ]
    assert {event.request for event in events if isinstance(event, RequestArrived)} == {"before", "later"}
    assert len([event for event in events if isinstance(event, LeaderElected)]) == 1
    assert verify(entries).ok
