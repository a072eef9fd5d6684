"""Profile `scale`: engines are really started and drained, under load."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman_lab.faults.injector import Injection
from tests.containers.faults import DOWN_SECONDS, FROZEN_SECONDS, Fault, carry_out, nothing
from tests.containers.fleet import ContainerFleet, running_fleet
from tests.containers.trial import DYING_CONNECTIONS, Observer

pytestmark = [
    pytest.mark.containers,
    DYING_CONNECTIONS,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

SCALED = "scaled-engine"
STEP_SECONDS_MAX = 90.0


@pytest.fixture(scope="module")
def fleet(copy: Path, image: str) -> Iterator[ContainerFleet]:
    with running_fleet(copy, "containers-scale", "scale") as fleet:
        yield fleet


@pytest.mark.parametrize("size", [4, 2])
async def test_the_pool_gets_another_size_and_nobody_notices(observer: Observer, size: int) -> None:
    row = await observer.trial(f"scale to {size}", lambda: scaled(observer.fleet, size), excused=nothing)

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()
    assert len(observer.fleet.of_service(SCALED)) == size - len(observer.fleet.of_service("engine"))


@pytest.mark.parametrize(
    "fault",
    [Fault("kill", "scaler", DOWN_SECONDS), Fault("freeze", "scaler", FROZEN_SECONDS)],
    ids=lambda fault: fault.name,
)
async def test_a_pool_does_not_need_its_scaler(observer: Observer, fault: Fault) -> None:
    async def strike() -> list[Injection]:
        return [await carry_out(observer.fleet, fault)]

    row = await observer.trial(fault.name, strike, excused=fault.excused)

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()


async def test_every_decision_of_the_scaled_pool_replays_identically(observer: Observer) -> None:
    assert await observer.replay() == []
    assert "different 0" in observer.fleet.pointsman("replay", "--from", "nats://nats:4222", "--verify")


async def scaled(fleet: ContainerFleet, size: int) -> list[Injection]:
    """An operator wants another size, and waits until the pool has it."""
    await asyncio.to_thread(fleet.pointsman, "scale", str(size), "--from", "nats://nats:4222", "--wait")
    deadline, wanted = time.monotonic() + STEP_SECONDS_MAX, size - len(fleet.of_service("engine"))
    while len(fleet.of_service(SCALED)) != wanted and time.monotonic() < deadline:  # noqa: ASYNC110 - Docker tells nobody
        await asyncio.sleep(0.5)
    return []
