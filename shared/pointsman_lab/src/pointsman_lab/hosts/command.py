"""Options in; a fleet on several hosts is served and struck; a report of all checks, and what the network cost, out."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import uvloop
from rich.console import Console

from pointsman.bounds import SHARE
from pointsman.primitives import WallSeconds
from pointsman.runtime.number_types import Finite
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.options import CONTEXT, COUNT, DIRECTORY, NOT_NEGATIVE, POSITIVE, out_option
from pointsman_cli.terminal import output_console
from pointsman_lab.faults.balancer import run_haproxy
from pointsman_lab.faults.data_directory import data_directory
from pointsman_lab.faults.injector import Injection
from pointsman_lab.faults.load import SteadyClients
from pointsman_lab.faults.report import FaultsReport, show
from pointsman_lab.faults.schedule import Fault, FaultError
from pointsman_lab.faults.trial import conclude, started_trial, struck_in_turn
from pointsman_lab.hosts.faults import CLIENTS, DEFAULT_FAULTS, HOSTS, HostInjector, host_faults
from pointsman_lab.hosts.fleet import HostsShape, start_hosts
from pointsman_lab.hosts.namespaces import Hosts, enter, made_hosts
from pointsman_lab.hosts.phases import Phase, measure, shown
from pointsman_lab.hosts.switch import Counts, LinkConditions

STREAMS, RATE = 12, 5.0
NEAR_SECONDS, RISE_SECONDS = 20.0, 5.0


class HostsReport(msgspec.Struct, kw_only=True):
    """`network`: what it carried in all."""

    faults: FaultsReport
    phases: list[Phase]
    network: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOptions:
    faults: list[Fault]
    nats_servers: str
    delay_ms: float
    loss: float
    rate: float
    engines: int
    env: tuple[str, ...]
    seed: int | None
    data: Path | None
    out: Path | None

    @property
    def shape(self) -> HostsShape:
        variables = dict(text.split("=", 1) for text in self.env)
        return HostsShape(servers=int(self.nats_servers), engines_each=self.engines, variables=variables)

    @property
    def conditions(self) -> LinkConditions:
        return LinkConditions(delay=WallSeconds(self.delay_ms / 1000), loss=self.loss)


def _faults(_context: click.Context, _parameter: click.Parameter, value: str) -> list[Fault]:
    try:
        return host_faults([name.strip() for name in value.split(",") if name.strip()])
    except FaultError as error:
        raise click.BadParameter(str(error)) from error


@click.command("hosts", context_settings=CONTEXT)
@click.option(
    "--faults",
    metavar="A[,B]",
    default=",".join(DEFAULT_FAULTS),
    show_default=True,
    callback=_faults,
    help="In their order: partition:HOST for 8 s, gone:HOST for 10 s, loss:network (5% for 20 s), calm:network. HOST: "
    "host-1, host-2, host-3, leader (that of the leading scheduler) or log (of the log's leading nats-server).",
)
@click.option(
    "--nats-servers",
    type=click.Choice(("1", "3")),
    default="3",
    show_default=True,
    help="3: a copy of the log on each host.",
)
@click.option("--delay-ms", type=NOT_NEGATIVE, default=20.0, show_default=True, help="Of each packet, one way.")
@click.option("--loss", type=Finite(SHARE), default=0.01, show_default=True, help="Share of lost packets.")
@click.option(
    "--rate", type=POSITIVE, default=RATE, show_default=True, help=f"Requests a second, beside {STREAMS} streams."
)
@click.option("--engines", type=COUNT, default=1, show_default=True, help="Simulated engines of each host.")
@click.option("--env", metavar="NAME=VALUE", multiple=True, help="Variable of every process. Repeatable.")
@click.option("--seed", type=int, metavar="N", help="Of the load and the network. Default: another each time.")
@click.option(
    "--data", type=DIRECTORY, help="Keep log files and archive there. Default: a temporary one, kept if anything fails."
)
@out_option
def hosts_command(**values: object) -> None:
    """Run a fleet on three hosts with a slow network that loses packets, take hosts away, and check as `faults` does.

    Each host is a network namespace with its own processes: a nats-server, two of them a scheduler and an ingress, the third
    the recorder and the rebalancer, all of them engines with one worker. Clients are on a fourth, behind haproxy. The first 20 s
    are without delay and loss, to compare with. Needs root, /dev/net/tun, ip and haproxy.

    \b
      pointsman-lab hosts                                                   about 4 minutes
      pointsman-lab hosts --nats-servers 1 --faults calm:network,partition:host-2,gone:host-1
      pointsman-lab hosts --env POINTSMAN_LEASE_SECONDS=3 --faults loss:network --seed 7

    Exit code 0 when everything held, 1 when something did not.
    """
    options = HostsOptions(**values)  # type: ignore[arg-type]
    configure_logging("error", "text")
    console = output_console()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    raised_open_files()
    with data_directory(options.data, prefix="pointsman-hosts-") as kept:
        with made_hosts([*HOSTS, CLIENTS], seed=seed) as hosts:
            enter(hosts.named(CLIENTS))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                report = runner.run(_run(options, seed, hosts, kept.path, console))
        kept.keep = kept.keep or not report.faults.ok
    show(console, report.faults)
    console.print(shown(report.phases))
    conclude(console, kept, options.out, report, ok=report.faults.ok)


async def _run(options: HostsOptions, seed: int, hosts: Hosts, directory: Path, console: Console) -> HostsReport:
    """One run, from a fresh fleet to the report. Raises FleetNotReadyError, NoBalancerError."""
    announced = ", ".join(fault.name for fault in options.faults)
    console.print(f"seed {seed}: {options.nats_servers} nats-servers; {announced}", soft_wrap=True, markup=False)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(start_hosts(options.shape, hosts, directory))
        balancer = await stack.enter_async_context(run_haproxy(fleet.file.of_role("ingress")))
        trial = await stack.enter_async_context(
            started_trial(fleet, balancer, name=f"bench-hosts-{seed}", speed=1.0, log_replicas=options.shape.servers)
        )
        injector = HostInjector(fleet, hosts, trial.link, seed=seed, watch=trial.watch, balancer=balancer)
        clients = SteadyClients(fleet.file, url=balancer.url, seed=seed, streams=STREAMS, rate=options.rate)
        near, offset = Phase(name="0 ms, no loss", begin=0.0, end=0.0), time.time() - time.monotonic()
        rise = _rise(near, hosts, options.conditions)
        result = await trial.judged(
            injector, clients, struck_in_turn(clients, injector, options.faults, console, rise=rise)
        )
    checked = result.report(seed=seed, workload="steady")
    phases = [near, *_phases(result.evidence.injections, offset)]
    measure(phases, result.evidence.entries, fleet.data / "logs")
    return HostsReport(faults=checked, phases=phases, network=hosts.change(hosts.conditions))


async def _rise(near: Phase, hosts: Hosts, conditions: LinkConditions) -> None:
    """Notes when the phase without delay and loss began and ended."""
    await asyncio.sleep(RISE_SECONDS)
    near.begin, near.end = time.time(), time.time() + NEAR_SECONDS
    await asyncio.sleep(NEAR_SECONDS)
    hosts.change(conditions)


def _phases(injections: Sequence[Injection], offset: float) -> list[Phase]:
    return [
        Phase(name=injection.fault, begin=injection.at + offset, end=injection.ended + offset)
        for injection in sorted(injections, key=lambda one: one.at)
    ]
