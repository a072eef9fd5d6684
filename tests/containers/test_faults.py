"""Each kind of container killed, frozen and cut off under load."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman_lab.faults.injector import Injection
from tests.containers.faults import (
    CUT_SECONDS,
    DOWN_SECONDS,
    FROZEN_SECONDS,
    Fault,
    carry_out,
    connections_of_a_dead_ingress,
    requests_sent_before_no_engine_was_left,
    streams_of_a_dead_engine,
)
from tests.containers.fleet import ContainerFleet, running_fleet
from tests.containers.trial import DYING_CONNECTIONS, Observer

pytestmark = [
    pytest.mark.containers,
    DYING_CONNECTIONS,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

KILLED = [
    Fault("kill", "nats", DOWN_SECONDS),
    Fault("kill", "scheduler", DOWN_SECONDS),
    Fault("kill", "ingress", DOWN_SECONDS, excused=connections_of_a_dead_ingress),
    Fault("kill", "rebalancer", DOWN_SECONDS),
    Fault("kill", "recorder", DOWN_SECONDS),
    Fault("kill", "worker", DOWN_SECONDS),
    Fault("kill", "engine", DOWN_SECONDS, excused=streams_of_a_dead_engine),
]
FROZEN = [Fault("freeze", fault.service, FROZEN_SECONDS) for fault in KILLED]
CUT = [
    Fault("cut", "worker", CUT_SECONDS, network="bus"),
    Fault("cut", "scheduler", CUT_SECONDS, network="bus"),
    Fault("cut", "ingress", CUT_SECONDS, network="bus"),
    Fault("cut", "nats", CUT_SECONDS, network="bus"),
    Fault("cut", "engine", CUT_SECONDS, network="engines", excused=streams_of_a_dead_engine),
    Fault(
        "cut",
        "ingress",
        CUT_SECONDS,
        network="engines",
        excused=requests_sent_before_no_engine_was_left,
    ),
]


@pytest.fixture(scope="module")
def fleet(copy: Path, image: str) -> Iterator[ContainerFleet]:
    with running_fleet(copy, "containers") as fleet:
        yield fleet


@pytest.mark.parametrize("fault", [*KILLED, *FROZEN, *CUT], ids=lambda fault: fault.name)
async def test_no_request_is_lost_or_doubled(observer: Observer, fault: Fault) -> None:
    async def strike() -> list[Injection]:
        return [await carry_out(observer.fleet, fault)]

    via = "bus" if fault.network == "engines" else "engines"
    row = await observer.trial(fault.name, strike, excused=fault.excused, via=via)

    assert row.findings == []
    assert (row.lost, row.doubled) == (0, 0)
    assert row.well_s is not None, await observer.unwell()


async def test_every_decision_of_the_faults_replays_identically(observer: Observer, fleet: ContainerFleet) -> None:
    assert await observer.replay() == []
    assert "different 0" in fleet.pointsman("replay", "--from", "nats://nats:4222", "--verify")
