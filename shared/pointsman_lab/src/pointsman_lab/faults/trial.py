"""What all runs of fault injection do: follow the log of a fleet, put it under load while faults strike it, gather the
evidence, report. The fleet, its faults and its clients are the caller's."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console

from pointsman.adapters.clocks import ScaledClock
from pointsman.ports import Link
from pointsman.primitives import EngineSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.simulation.metrics import percentile
from pointsman_cli.command_client import person
from pointsman_cli.output_file import write_json
from pointsman_lab.faults.bad_engines import EngineWatch, count_touched
from pointsman_lab.faults.balancer import Balancer
from pointsman_lab.faults.checks import agrees, findings
from pointsman_lab.faults.clients import Clients, Exchange, first_byte_waits, unserved
from pointsman_lab.faults.data_directory import DataDirectory
from pointsman_lab.faults.fleet import FleetUnderTest
from pointsman_lab.faults.injector import Injection, Injector
from pointsman_lab.faults.load import BusyShare, SteadyClients
from pointsman_lab.faults.log_tail import LogTail, followed
from pointsman_lab.faults.observations import Evidence, evidence_of, look_at
from pointsman_lab.faults.report import FaultsReport, progress_line, reported
from pointsman_lab.faults.schedule import Fault

SETTLE_SECONDS = 3.0
VIOLATED_EXIT_CODE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    evidence: Evidence
    clients: Clients
    wall_s: EngineSeconds
    busy_share: float

    def report(self, *, seed: int, workload: str) -> FaultsReport:
        """Adds what the clients saw to the injections."""
        _note_service(self.evidence, self.clients)
        return reported(
            self.evidence,
            findings(self.evidence),
            seed=seed,
            workload=workload,
            wall_s=self.wall_s,
            busy_share=self.busy_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`log_replicas`: copies of the log."""

    fleet: FleetUnderTest
    balancer: Balancer | None
    link: Link
    log_tail: LogTail
    log_replicas: int

    @property
    def watch(self) -> EngineWatch:
        return EngineWatch(self.log_tail, self.fleet.data)

    async def judged(self, injector: Injector, clients: Clients, load: Awaitable[None]) -> TrialResult:
        """`load`: `clients` send while `injector` strikes."""
        started, busy = time.monotonic(), BusyShare()
        await load
        wall_s, busy_share = time.monotonic() - started, busy.share
        evidence = await evidence_of(
            self.link,
            self.log_tail,
            clients.exchanges,
            injector.injections,
            leader=injector.leader,
            look=partial(look_at, self.fleet),
            in_agreement=agrees,
        )
        evidence.balancer, evidence.log_replicas = self.balancer, self.log_replicas
        return TrialResult(evidence=evidence, clients=clients, wall_s=wall_s, busy_share=busy_share)


@asynccontextmanager
async def started_trial(
    fleet: FleetUnderTest, balancer: Balancer | None, *, name: str, speed: float, log_replicas: int
) -> AsyncIterator[Trial]:
    """Follows the log of a fleet that is up. `name`: of the connection to its log."""
    settings = fleet.settings
    async with (
        open_link(settings, ScaledClock(speed), HealthBoard(), name=name, user=person(settings)) as link,
        followed(link, speed) as log_tail,
    ):
        yield Trial(fleet=fleet, balancer=balancer, link=link, log_tail=log_tail, log_replicas=log_replicas)


async def struck_in_turn(
    clients: SteadyClients, injector: Injector, faults: Sequence[Fault], console: Console, *, rise: Awaitable[None]
) -> None:
    """A steady load: the faults in their order, each when the fleet is well after the last one. `rise`: before the first."""
    async with asyncio.TaskGroup() as group:
        group.create_task(clients.run())
        await rise
        await injector.run_in_turn(
            faults,
            settle=SETTLE_SECONDS,
            on_injected=lambda injection: console.print(progress_line(injection), soft_wrap=True, markup=False),
        )
        clients.stop()


def conclude(console: Console, kept: DataDirectory, out: Path | None, report: msgspec.Struct, *, ok: bool) -> NoReturn:
    """Ends the command after its report is shown."""
    if kept.keep:
        console.print(f"log files and archive are in {kept.path}", soft_wrap=True)
    if out:
        write_json(out, report)
    sys.exit(0 if ok else VIOLATED_EXIT_CODE)


def _note_service(evidence: Evidence, clients: Clients) -> None:
    injections = sorted(evidence.injections, key=lambda injection: injection.at)
    usual = clients.usual_ttft([injection.at for injection in injections])
    for number, injection in enumerate(injections):
        ends = injections[number + 1].at if number + 1 < len(injections) else float("inf")
        injection.served_s = clients.first_answer_after(injection.at)
        injection.normal_s = clients.normal_after(injection.at, ends, usual=usual)
        injection.streams_cut = clients.cut_between(injection.at, ends)
        _note_answers(injection, clients.between(injection.at, ends))
        if evidence.balancer is not None:
            injection.out_of_rotation = evidence.balancer.out_of_rotation(injection.at, min(ends, injection.ended))
        if injection.touched is not None:
            count_touched(
                injection.touched,
                began=injection.at,
                ended=injection.at + injection.lasted,
                exchanges=evidence.exchanges,
                entries=evidence.entries,
            )


def _note_answers(injection: Injection, exchanges: list[Exchange]) -> None:
    injection.answered = len(exchanges)
    injection.statuses = dict(Counter(str(e.status) for e in exchanges if e.status != HTTPStatus.OK))
    injection.failed = sum(unserved(e) for e in exchanges)
    injection.ttft_p99_s = percentile(first_byte_waits(exchanges), 99)
