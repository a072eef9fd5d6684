"""A trial: clients send to a fleet in containers, something happens to it, and the end is judged."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import FleetDescribed
from pointsman.ports import Link
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.simulation.replay import verify
from pointsman_cli.command_client import person
from pointsman_cli.up.child import missing_parts
from pointsman_cli.up.probe import NoAnswerError, http_get
from pointsman_lab.faults.checks import agrees, one_leader_a_term
from pointsman_lab.faults.clients import Exchange
from pointsman_lab.faults.injector import Injection, leader_of
from pointsman_lab.faults.log_tail import LogTail, followed
from pointsman_lab.faults.observations import Evidence, ask_engines, evidence_of, read_archive
from tests.containers.fleet import MODEL, POOL, Container, ContainerFleet
from tests.containers.judge import Row, judged
from tests.containers.load import ContainerClients
from tests.containers.received import ReceivedRequests

CALM_SECONDS, SETTLE_SECONDS = 3.0, 3.0
WELL_SECONDS_MAX, WELL_POLL_SECONDS, PROBE_SECONDS_MAX = 90.0, 0.25, 1.0
PROBES = {"engine": "8080/health", "ingress": "8081/readyz"}
READY_PROBE = "8080/readyz"
WITHOUT_PROBE, ONE_SHOT = ("nats", "haproxy", "docker"), "credentials"
seeds = count(1)
DYING_CONNECTIONS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""The NATS client leaves the socket of a connection attempt that failed to the garbage collector."""


@dataclass(slots=True)
class Observer:
    """Reads the fleet's log for as long as the fleet is up; judges trials; holds their rows."""

    fleet: ContainerFleet
    settings: FleetSettings
    link: Link
    tail: LogTail
    url: str = ""
    rows: list[Row] = field(default_factory=list)

    async def leader(self) -> FleetDescribed | None:
        return await leader_of(self.link, PoolName(POOL))

    async def trial(
        self,
        name: str,
        happens: Callable[[], Awaitable[list[Injection]]],
        *,
        excused: Callable[[Exchange, Injection], bool],
        via: str = "engines",
    ) -> Row:
        """Judges what `happens` under load. It returns when all of it is over but the recovery."""
        await self.until_well()
        await self._caught_up()
        resets = len(self.tail.resets)
        received, first = ReceivedRequests(self.fleet, time.time()), self.tail.state.sequence
        watching = asyncio.create_task(received.watch())
        clients = ContainerClients(self.fleet, seed=next(seeds), via=via, url=self.url)
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            await asyncio.sleep(CALM_SECONDS)
            struck_at = time.monotonic()
            injections = await happens()
            over_at = time.monotonic()
            well = await self.until_well()
            await asyncio.sleep(SETTLE_SECONDS)
            clients.stop()
            stopped_at = time.monotonic()
        watching.cancel()
        evidence = await evidence_of(
            self.link,
            self.tail,
            clients.exchanges,
            injections,
            leader=self.leader,
            look=self._look,
            in_agreement=agrees,
        )
        row = judged(
            name,
            replace(evidence, resets=evidence.resets[resets:]),
            await asyncio.to_thread(received.counted),
            first=first,
            excused=lambda exchange: any(excused(exchange, injection) for injection in injections),
            load=(struck_at, stopped_at),
            well_s=None if well is None else well - over_at,
        )
        self.rows.append(row)
        return row

    async def _caught_up(self) -> None:
        last = (await self.link.log.extent()).last
        while self.tail.state.sequence < last:  # noqa: ASYNC110 - the tail tells nobody
            await asyncio.sleep(WELL_POLL_SECONDS)

    async def until_well(self) -> float | None:
        """When everything was ready (monotonic); None if not in time."""
        deadline = time.monotonic() + WELL_SECONDS_MAX
        while time.monotonic() < deadline:
            if not await self.unwell():
                return time.monotonic()
            await asyncio.sleep(WELL_POLL_SECONDS)
        return None

    async def unwell(self) -> list[str]:
        containers = await asyncio.to_thread(self.fleet.containers)
        probed = await asyncio.gather(*(_why_unwell(container) for container in containers.values()))
        return [reason for reason in probed if reason] + ([] if await self.leader() else ["nobody leads"])

    async def replay(self) -> list[str]:
        """Recomputes every decision of the log, and notes the result in each row."""
        entries = list(self.tail.entries)
        verdict = await asyncio.to_thread(verify, entries)
        for row in self.rows:
            begin, end = row.entries
            different = sum(begin <= one.sequence <= end for one in verdict.differences)
            row.replay = f"different {different}"
        evidence = Evidence([], [], entries, [], self.tail.state, None)
        evidence.log_replicas = len(self.settings.nats.split(","))
        return [*map(str, verdict.differences), *one_leader_a_term(evidence)]

    async def _look(self, evidence: Evidence) -> None:
        containers = await asyncio.to_thread(self.fleet.containers)
        endpoints = {
            one.instance: f"tcp://{one.addresses['engines']}:5558"
            for one in containers.values()
            if one.is_engine and "engines" in one.addresses
        }
        await ask_engines(endpoints, self.settings, MODEL, evidence)
        await asyncio.to_thread(self._read_archive, evidence)

    def _read_archive(self, evidence: Evidence) -> None:
        with tempfile.TemporaryDirectory(prefix="pointsman-archive-") as place:
            self.fleet.command("cp", "recorder:/var/lib/pointsman/.", place)
            read_archive(Path(place) / "archive.sqlite", evidence)


@asynccontextmanager
async def observing(fleet: ContainerFleet, *servers: str, url: str = "") -> AsyncIterator[Observer]:
    """`servers`: services of a cluster of nats-servers. `url`: of a balancer in front of the ingresses."""
    settings = await asyncio.to_thread(fleet.settings)
    if servers:
        addresses = [await asyncio.to_thread(fleet.address, server, "bus") for server in servers]
        settings = replace(settings, nats=",".join(f"nats://{address}:4222" for address in addresses))
    async with (
        open_link(settings, ScaledClock(1.0), HealthBoard(), name="containers", user=person(settings)) as link,
        followed(link, 1.0) as tail,
    ):
        yield Observer(fleet, settings, link, tail, url)


async def _why_unwell(container: Container) -> str:
    if container.service == ONE_SHOT:
        return ""
    role = "engine" if container.is_engine else container.service.partition("-")[0]
    if container.state != "running":
        return f"{container.name} is {container.state}"
    if role in WITHOUT_PROBE:
        return ""
    address = container.addresses.get("bus") or container.addresses.get("engines")
    try:
        status, body = await http_get(f"http://{address}:{PROBES.get(role, READY_PROBE)}", timeout=PROBE_SECONDS_MAX)
    except NoAnswerError as error:
        return f"{container.name}: {error}"
    missing = missing_parts(body) if role != "engine" else {}
    return f"{container.name}: {status} {missing}" if status != 200 or missing else ""
