"""A leader whose log does not keep up, or that does not itself: what it refuses, what it goes on with, what the log tells."""

import pytest

from pointsman.contracts.commands import MigrateRequests, MigrationAnswered, RouteGranted, RouteRejected
from pointsman.contracts.decisions import LeaderElected, RequestsRefused
from pointsman.contracts.requests import RequestArrived
from pointsman.simulation.replay import verify
from pointsman_lab.memory.log import MemoryLog
from tests.support.events import finished, first_token
from tests.support.memory_pool import MemoryPool
from tests.support.waiting import eventually


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every log says of its window."""
    now = [0.0]
    monkeypatch.setattr(MemoryLog, "write_load", property(lambda _log: now[0]))
    return now


async def test_new_requests_are_refused_unwritten_known_ones_go_on_and_the_log_counts_the_refused(
    load: list[float],
) -> None:
    pool = MemoryPool()
    await pool.append(pool.joined("engine-1"))

    async def ask(request: str) -> object:
        return await pool.route(request, [1, 2])

    async with pool.leader() as service:
        assert isinstance(await ask("before"), RouteGranted)
        load[0] = 0.6
        written = pool.broker.extent.last
        refused = [await ask(f"new-{number}") for number in range(3)]
        again = await ask("before")
        after = pool.broker.extent.last
        plan = MigrateRequests(plan="p", term=service.leading.term, as_of=service.state.sequence, moves=[], policy="x")  # type: ignore[union-attr]
        answered = await pool.ask(plan, kind="migrate")
        await pool.append(first_token("before", "engine-1", at=pool.clock.now()))
        await pool.append(finished("before", "engine-1", at=pool.clock.now()))
        load[0] = 0.0
        assert isinstance(await ask("later"), RouteGranted)

        async def told() -> bool:
            return any(isinstance(event, RequestsRefused) for event in await pool.events())

        await eventually(told)
        events = await pool.events()
        entries = await pool.entries()

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
