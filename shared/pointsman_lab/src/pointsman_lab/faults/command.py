"""Options in; a fleet is served and struck; a report of all checks out."""

import asyncio
import secrets
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
import uvloop
from click.core import ParameterSource
from rich.console import Console

from pointsman.adapters.clocks import ScaledClock
from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.telemetry import configure_logging
from pointsman.simulation.workload import WorkloadRequest, at_rate
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.command_client import person
from pointsman_cli.options import CONTEXT, COUNT, DEFAULT_INPUT_CAP, DIRECTORY, INSTANCES, POSITIVE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.terminal import output_console
from pointsman_cli.workload_options import check_one_workload, workload_name, workload_options, workload_requests
from pointsman_lab.faults.bad_engines import EngineWatch
from pointsman_lab.faults.balancer import Balancer, run_haproxy
from pointsman_lab.faults.checks import agrees, findings
from pointsman_lab.faults.clients import Clients
from pointsman_lab.faults.data_directory import data_directory
from pointsman_lab.faults.fleet import FleetUnderTest, Shape, start_fleet
from pointsman_lab.faults.injector import Injector
from pointsman_lab.faults.load import ENGINE_ARGUMENTS, RATE, STREAMS, BusyShare, SteadyClients
from pointsman_lab.faults.log_tail import LogTail
from pointsman_lab.faults.observations import gathered
from pointsman_lab.faults.report import FaultsReport, progress_line, reported, show
from pointsman_lab.faults.schedule import (
    DEFAULT_FAULTS,
    OF_OWN_SERVERS,
    Fault,
    FaultError,
    checked,
    in_turn,
    rolling,
    scheduled,
)
from pointsman_lab.faults.service import note_service

DEFAULT_REQUESTS = 2000
DEFAULT_SPEED = 5.0
OUTPUT_TOKENS_MAX = 64
SCHEDULERS = 2
INGRESSES = 2
RATE_EACH_ENGINE = 0.5
WARM_UP_SECONDS = 1.0
STEADY_SPEED = 1.0
RISE_SECONDS = 10.0
SETTLE_SECONDS = 3.0
VIOLATED_EXIT_CODE = 1


def _faults(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    try:
        return checked([name.strip() for name in value.split(",") if name.strip()])
    except FaultError as error:
        raise click.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsOptions:
    trace: Path | None
    workload: str | None
    requests: int
    faults: tuple[str, ...]
    seed: int | None
    instances: int
    nats_servers: str
    speed: float
    rate: float | None
    data: Path | None
    out: Path | None
    haproxy: bool
    rolling: bool

    @property
    def steady(self) -> bool:
        return self.haproxy or self.rolling

    @property
    def steady_rate(self) -> float:
        return self.rate or RATE


@click.command("faults", context_settings=CONTEXT)
@workload_options
@click.option("--requests", type=COUNT, metavar="N", default=DEFAULT_REQUESTS, show_default=True, help="At most.")
@click.option(
    "--faults",
    metavar="A[,B]",
    default=",".join(DEFAULT_FAULTS),
    show_default=True,
    callback=_faults,
    help="Each once: kill:PROCESS, freeze:PROCESS (SIGSTOP for 1 to 4 s), restart:PROCESS (SIGTERM), down:nats (for 10 s), "
    "network:cut, network:delay, network:drop, errors:engine, hang:engine, slow:engine (for 30 s). PROCESS: leader, "
    "follower, ingress, worker, engine, nats, recorder, ..., any; several at once as kill:ingress+leader.",
)
@click.option(
    "--haproxy",
    is_flag=True,
    help="Two ingresses behind haproxy (from PATH) under a steady load instead of a workload; the faults come in their order, "
    "each when the fleet is well after the last one.",
)
@click.option(
    "--rolling",
    is_flag=True,
    help="As --haproxy, and the faults are a rolling restart: ingresses, schedulers, workers and rebalancer, one by one.",
)
@click.option("--seed", type=int, metavar="N", help="Of the faults and the workload. Default: another each time.")
@click.option("--instances", type=INSTANCES, metavar="N", default=4, show_default=True, help="Simulated engines.")
@click.option(
    "--nats-servers",
    type=click.Choice(("1", "3")),
    default="1",
    show_default=True,
    help="3: a cluster, each with a copy of the log; kill:nats then strikes the one that leads the log.",
)
@click.option(
    "--speed", type=POSITIVE, metavar="X", help=f"Of the engines. Default: {DEFAULT_SPEED:g}; of a steady load 1."
)
@click.option(
    "--rate",
    type=POSITIVE,
    metavar="R",
    help=f"Requests a second. Default: {RATE_EACH_ENGINE:g} of engine time for each engine; of a steady load {RATE:g}.",
)
@click.option(
    "--data", type=DIRECTORY, help="Keep log files and archive there. Default: a temporary one, kept if anything fails."
)
@out_option
@click.pass_context
def faults_command(context: click.Context, /, **values: object) -> None:
    """Kill the processes of a real fleet while it serves, and check that nothing was lost, doubled or made up.

    Starts a fleet (two schedulers, simulated engines with workers, a recorder, a nats-server), sends it requests over
    HTTP, strikes at random times from the seed, and lets what died be started again. At the end, once all is quiet:
    each request has one answer and one end, no leader wrote out of its term, every decision is identical when it is
    taken again (as `replay --verify` does), the index equals what the engines hold, and the archive holds the log.

    \b
      pointsman-lab faults --workload chat --requests 300                  a minute, to see it
      pointsman-lab faults --trace conversation.jsonl --out faults.json    2,000 requests, about 4 minutes
      pointsman-lab faults --workload chat --seed 7 --faults network:cut,network:drop,freeze:leader
      pointsman-lab faults --rolling                                       a rolling restart behind haproxy, 3 minutes
      pointsman-lab faults --haproxy --faults down:nats,errors:engine,hang:engine,slow:engine       and no client notices

    Exit code 0 when everything held, 1 when something did not. `pointsman-lab torture` does the same to a fleet in virtual
    time, thousands of times.
    """
    if values["rolling"] and context.get_parameter_source("faults") is ParameterSource.COMMANDLINE:
        msg = "--rolling has faults of its own; leave --faults away"
        raise click.UsageError(msg)
    speed = values.pop("speed") or (STEADY_SPEED if values["haproxy"] or values["rolling"] else DEFAULT_SPEED)
    options = FaultsOptions(**values, speed=speed)  # type: ignore[arg-type]
    configure_logging("error", "text")
    console = output_console()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    requests = _requests(options, seed)
    raised_open_files()
    with (
        data_directory(options.data, prefix="pointsman-faults-") as kept,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(_run(options, seed, requests, kept.path, console))
        kept.keep = kept.keep or not report.ok
    show(console, report)
    if kept.keep:
        console.print(f"log files and archive are in {kept.path}", soft_wrap=True)
    if options.out:
        write_json(options.out, report)
    sys.exit(0 if report.ok else VIOLATED_EXIT_CODE)


async def _run(
    options: FaultsOptions, seed: int, requests: list[WorkloadRequest], directory: Path, console: Console
) -> FaultsReport:
    """One run, from a fresh fleet to the report. Raises FleetStartError, NatsStartError, NoBalancerError."""
    faults = _faults_of(options, seed, requests)
    console.print(_announced(options, seed, requests, faults), soft_wrap=True, markup=False)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(start_fleet(_shape(options, seed, faults), directory))
        balancer = (
            await stack.enter_async_context(run_haproxy(fleet.file.of_role("ingress"))) if options.steady else None
        )
        clock = ScaledClock(options.speed)
        link = await stack.enter_async_context(
            open_link(fleet.settings, clock, HealthBoard(), name=f"bench-faults-{seed}", user=person(fleet.settings))
        )
        log_tail = LogTail(options.speed)
        reading = asyncio.create_task(log_tail.follow(link))
        await asyncio.sleep(WARM_UP_SECONDS)
        watch = EngineWatch(log_tail, fleet.data)
        injector = Injector(fleet, link, seed=seed, watch=watch, balancer=balancer)
        started, busy = time.monotonic(), BusyShare()
        clients = await _serve_and_inject(options, requests, seed, injector, faults, fleet, balancer, console)
        wall_s, busy_share = time.monotonic() - started, busy.share
        evidence = await gathered(fleet, link, injector, log_tail, clients.exchanges, in_agreement=agrees)
        evidence.balancer, evidence.log_replicas = balancer, int(options.nats_servers)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    note_service(evidence, clients)
    name = "steady" if options.steady else workload_name(options.trace, options.workload)
    return reported(evidence, findings(evidence), seed=seed, workload=name, wall_s=wall_s, busy_share=busy_share)


async def _serve_and_inject(
    options: FaultsOptions,
    requests: list[WorkloadRequest],
    seed: int,
    injector: Injector,
    faults: list[Fault],
    fleet: FleetUnderTest,
    balancer: Balancer | None,
    console: Console,
) -> Clients:
    if balancer is None:
        clients = Clients(fleet.file, requests, seed=seed, tokens_max=OUTPUT_TOKENS_MAX)
        with progress_bar(console, len(requests), "requests") as update:
            async with asyncio.TaskGroup() as group:
                group.create_task(injector.run(faults))
                group.create_task(clients.run(lambda: update(len(clients.exchanges), "")))
        return clients
    steady = SteadyClients(fleet.file, url=balancer.url, seed=seed, streams=STREAMS, rate=options.steady_rate)
    async with asyncio.TaskGroup() as group:
        group.create_task(steady.run())
        await asyncio.sleep(RISE_SECONDS)
        await injector.run_in_turn(
            faults,
            settle=SETTLE_SECONDS,
            on_injected=lambda injection: console.print(progress_line(injection), soft_wrap=True, markup=False),
        )
        steady.stop()
    return steady


def _faults_of(options: FaultsOptions, seed: int, requests: list[WorkloadRequest]) -> list[Fault]:
    if options.steady:
        names = rolling(ingresses=INGRESSES, schedulers=SCHEDULERS, engines=options.instances)
        return in_turn(names if options.rolling else options.faults, seed=seed)
    return scheduled(options.faults, seed=seed, seconds=requests[-1].arrival_s / options.speed)


def _shape(options: FaultsOptions, seed: int, faults: list[Fault]) -> Shape:
    arguments = ["--schedulers", str(SCHEDULERS)]
    if options.steady:
        arguments += ["--ingresses", str(INGRESSES), "--engine-args", ENGINE_ARGUMENTS]
    return Shape(
        fleet=FreshFleet(policy=DEFAULT_ROUTING, instances=options.instances, speed=options.speed, arguments=arguments),
        servers=int(options.nats_servers),
        network=any(fault.action == "network" for fault in faults),
        own=any(fault.action in OF_OWN_SERVERS for fault in faults),
        seed=seed,
    )


def _announced(options: FaultsOptions, seed: int, requests: list[WorkloadRequest], faults: list[Fault]) -> str:
    if options.steady:
        return (
            f"seed {seed}: {STREAMS} streams and {options.steady_rate:g} requests/s through haproxy and "
            f"{INGRESSES} ingresses to {options.instances} engines at speed {options.speed:g}; "
            + ", ".join(fault.name for fault in faults)
        )
    seconds = requests[-1].arrival_s / options.speed
    struck = ", ".join(f"{fault.name} at {fault.at:.1f} s" for fault in faults) or "nothing"
    return (
        f"seed {seed}: {len(requests):,} requests in {seconds:.0f} s to {options.instances} engines at speed "
        f"{options.speed:g}; {struck}"
    )


def _requests(options: FaultsOptions, seed: int) -> list[WorkloadRequest]:
    """Empty for a steady load. Raises click.ClickException."""
    if options.steady:
        if options.trace is not None or options.workload is not None:
            msg = "a steady load takes neither --trace nor --workload"
            raise click.UsageError(msg)
        return []
    if options.nats_servers != "1" and any(name.startswith("network") for name in options.faults):
        msg = "faults of the network are for one nats-server"
        raise click.UsageError(msg)
    check_one_workload(options.trace, options.workload)
    rate = options.rate or RATE_EACH_ENGINE * options.instances
    found = workload_requests(
        options.trace,
        options.workload,
        requests=options.requests,
        seed=seed,
        rate=rate,
        input_tokens_max=DEFAULT_INPUT_CAP,
    )
    return at_rate(found, rate)
