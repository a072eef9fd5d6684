"""deploy/compose/cluster.yml loses the nats-server that leads the log, a scheduler, an ingress behind haproxy."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from pointsman.contracts.permissions import SERVICE_API
from pointsman.contracts.subjects import stream_name
from pointsman.primitives import PoolName, WallSeconds
from pointsman_lab.faults.injector import Injection
from tests.containers.faults import (
    CUT_SECONDS,
    DOWN_SECONDS,
    FROZEN_SECONDS,
    Fault,
    answers_of_a_dead_ingress_behind_haproxy,
    carry_out,
)
from tests.containers.fleet import OVERRIDE, POOL, ContainerFleet, running_fleet
from tests.containers.judge import Row
from tests.containers.trial import DYING_CONNECTIONS, Observer, observing

pytestmark = [
    pytest.mark.containers,
    DYING_CONNECTIONS,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

CLUSTER = ("docker-compose.yml", "deploy/compose/cluster.yml", OVERRIDE)
LOG_LEADER = "the log's leader"
SERVERS = {"nats-1": "nats", "nats-2": "nats-2", "nats-3": "nats-3"}
FAULTS = [
    Fault("kill", LOG_LEADER, DOWN_SECONDS),
    Fault("freeze", LOG_LEADER, FROZEN_SECONDS),
    Fault("cut", LOG_LEADER, CUT_SECONDS, network="bus"),
    Fault("kill", "scheduler", DOWN_SECONDS),
    Fault("kill", "scheduler-2", DOWN_SECONDS),
    Fault("kill", "ingress", DOWN_SECONDS, excused=answers_of_a_dead_ingress_behind_haproxy),
    Fault("cut", "ingress-2", CUT_SECONDS, network="bus"),
]


@pytest.fixture(scope="module")
def fleet(copy: Path, image: str) -> Iterator[ContainerFleet]:
    with running_fleet(copy, "containers-cluster", files=CLUSTER) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observer(fleet: ContainerFleet, table: list[Row]) -> AsyncIterator[Observer]:
    async with observing(fleet, *SERVERS.values(), url=fleet.url) as observer:
        yield observer
        table += observer.rows


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_no_request_is_lost_or_doubled(observer: Observer, fault: Fault) -> None:
    async def strike() -> list[Injection]:
        struck = replace(fault, service=await log_leader(observer)) if fault.service == LOG_LEADER else fault
        return [await carry_out(observer.fleet, struck)]

    row = await observer.trial(f"cluster: {fault.name}", strike, excused=fault.excused)

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()


async def test_every_decision_of_the_cluster_replays_identically(observer: Observer) -> None:
    assert await observer.replay() == []
    assert "different 0" in observer.fleet.pointsman("replay", "--from", "nats://nats:4222", "--verify")


async def log_leader(observer: Observer) -> str:
    """The service of the nats-server that leads the log."""
    subject = f"{SERVICE_API}STREAM.INFO.{stream_name(PoolName(POOL))}"
    async with asyncio.timeout(20):
        while True:
            answer = await observer.link.commands.request_bytes(subject, b"", timeout=WallSeconds(2.0))
            if leader := msgspec.json.decode(answer).get("cluster", {}).get("leader"):
                return SERVERS[leader]
            await asyncio.sleep(0.2)
