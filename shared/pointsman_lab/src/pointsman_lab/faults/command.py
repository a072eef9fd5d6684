"""Options in; a fleet is served and struck; a report of all checks out."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
import uvloop
from click.core import ParameterSource
from rich.console import Console

from pointsman.policies.routing import DEFAULT_ROUTING
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.structured_logs import configure_logging
from pointsman.simulation.workload import WorkloadRequest, at_rate
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.options import CONTEXT, COUNT, DEFAULT_INPUT_CAP, DIRECTORY, INSTANCES, POSITIVE, out_option
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.terminal import output_console
from pointsman_cli.workload_options import check_one_workload, workload_name, workload_options, workload_requests
from pointsman_lab.faults.balancer import run_haproxy
from pointsman_lab.faults.clients import Clients
from pointsman_lab.faults.data_directory import data_directory
from pointsman_lab.faults.fleet import Shape, start_fleet
from pointsman_lab.faults.injector import Injector
from pointsman_lab.faults.load import ENGINE_ARGUMENTS, RATE, STREAMS, SteadyClients
from pointsman_lab.faults.report import FaultsReport, show
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
from pointsman_lab.faults.trial import conclude, started_trial, struck_in_turn

DEFAULT_REQUESTS = 2000
DEFAULT_SPEED = 5.0
OUTPUT_TOKENS_MAX = 64
SCHEDULERS = 2
INGRESSES = 2
RATE_EACH_ENGINE = 0.5
WARM_UP_SECONDS = 1.0
STEADY_SPEED = 1.0
RISE_SECONDS = 10.0


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
        raise click.UsageError("--rolling has faults of its own; leave --faults away")
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
    conclude(console, kept, options.out, report, ok=report.ok)


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
        trial = await stack.enter_async_context(
            started_trial(
                fleet,
                balancer,
                name=f"bench-faults-{seed}",
                speed=options.speed,
                log_replicas=int(options.nats_servers),
            )
        )
        await asyncio.sleep(WARM_UP_SECONDS)
        injector = Injector(fleet, trial.link, seed=seed, watch=trial.watch, balancer=balancer)
        if balancer is None:
            clients = Clients(fleet.file, requests, seed=seed, tokens_max=OUTPUT_TOKENS_MAX)
            load = _workload(clients, injector, requests, faults, console)
        else:
            clients = steady = SteadyClients(
                fleet.file, url=balancer.url, seed=seed, streams=STREAMS, rate=options.steady_rate
            )
            load = struck_in_turn(steady, injector, faults, console, rise=asyncio.sleep(RISE_SECONDS))
        result = await trial.judged(injector, clients, load)
    name = "steady" if options.steady else workload_name(options.trace, options.workload)
    return result.report(seed=seed, workload=name)


async def _workload(
    clients: Clients, injector: Injector, requests: list[WorkloadRequest], faults: list[Fault], console: Console
) -> None:
    with progress_bar(console, len(requests), "requests") as update:
        async with asyncio.TaskGroup() as group:
            group.create_task(injector.run(faults))
            group.create_task(clients.run(lambda: update(len(clients.exchanges), "")))


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
            raise click.UsageError("a steady load takes neither --trace nor --workload")
        return []
    if options.nats_servers != "1" and any(name.startswith("network") for name in options.faults):
        raise click.UsageError("faults of the network are for one nats-server")
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
