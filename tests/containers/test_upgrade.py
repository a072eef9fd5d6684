"""Every service gets a new image under load: the same code, another tag and label."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman_lab.faults.injector import Injection
from tests.containers.faults import injected, nothing, what_all_engines_had_begun
from tests.containers.fleet import ContainerFleet, relabelled, running_fleet
from tests.containers.trial import DYING_CONNECTIONS, Observer

pytestmark = [
    pytest.mark.containers,
    DYING_CONNECTIONS,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

NEXT_IMAGE = "pointsman:containers-next"
ORDER = ("nats", "scheduler", "worker", "ingress", "rebalancer", "recorder")
"""Of an upgrade of Pointsman (docs/upgrades.md): engines are not part of it."""


@pytest.fixture(scope="module")
def fleet(copy: Path, image: str) -> Iterator[ContainerFleet]:
    relabelled(image, NEXT_IMAGE)
    with running_fleet(copy, "containers") as fleet:
        yield fleet


@pytest.mark.parametrize("service", ORDER)
async def test_clients_do_not_notice_an_upgrade(observer: Observer, service: str) -> None:
    row = await observer.trial(f"upgrade {service}", lambda: upgrade(observer.fleet, service), excused=nothing)

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()
    assert {container.image for container in observer.fleet.of_service(service)} == {NEXT_IMAGE}


async def test_all_engines_at_once_lose_only_what_they_had_begun(
    observer: Observer,
) -> None:
    row = await observer.trial(
        "upgrade engine", lambda: upgrade(observer.fleet, "engine"), excused=what_all_engines_had_begun
    )

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()
    assert {container.image for container in observer.fleet.of_service("engine")} == {NEXT_IMAGE}


async def test_every_decision_of_the_upgrade_replays_identically(observer: Observer) -> None:
    assert await observer.replay() == []
    assert "different 0" in observer.fleet.pointsman("replay", "--from", "nats://nats:4222", "--verify")


async def upgrade(fleet: ContainerFleet, service: str) -> list[Injection]:
    """`docker compose up` of one service with the new image."""
    fleet.variables["POINTSMAN_IMAGE"] = NEXT_IMAGE
    replaced, at = fleet.of_service(service), time.monotonic()
    await asyncio.to_thread(fleet.command, "up", "--detach", "--wait", "--no-deps", "--no-build", service)
    return [injected("upgrade", container, at) for container in replaced]
