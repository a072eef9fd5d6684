"""A two-phase load on a fleet that scales; its log as a timeline, and a verdict."""

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.primitives import EngineSeconds
from pointsman.runtime.structured_logs import configure_logging
from pointsman.simulation.goodput import TARGET
from pointsman.simulation.workload import WorkloadRequest, at_rate
from pointsman.state.state import PoolSettings
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.bench.load import LoadGenerator, Target
from pointsman_cli.discovery import FleetFile
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.options import CONTEXT, COUNT, DEFAULT_INPUT_CAP, DIRECTORY, POSITIVE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.workload_options import workload_name, workload_requests
from pointsman_lab.elasticity.timeline import Stretch, Timeline, TimelineReader

SHOW_SECONDS = 5.0
SETTLE_SECONDS_MAX = 20.0
MISSED_EXIT_CODE = 1
SEED = 1
SCALING = SloAttainment.name
SLO_TTFT_SECONDS: EngineSeconds = 5.0
STRETCH_SECONDS: EngineSeconds = 15.0
DEFAULT_WORKLOAD = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticityOptions:
    trace: Path | None
    policy: str
    instances: tuple[int, int]
    rate: float
    high_seconds: float
    low_seconds: float
    speed: float
    output_tokens_max: int | None
    out: Path | None
    plot: Path | None


class ElasticityReport(msgspec.Struct, kw_only=True):
    """`recovered_s`: engine seconds after which attainment stays at the target until the load halves, or null.
    `high_attainment`: from then on; `low_attainment`: of arrivals after the load halved."""

    workload: str
    policy: str
    scaling: str
    speed: float
    rate: float
    halves_at_s: EngineSeconds
    target: float
    requests: int
    completed: int
    rejected: int
    failed: int
    smallest: int
    largest: int
    size_at_end: int
    worst_attainment: float | None
    recovered_s: EngineSeconds | None
    high_attainment: float | None
    low_attainment: float | None
    remapped_within_bound: int
    changes: int
    failed_while_draining: int
    placed_after_draining: int
    timeline: Timeline


def _range(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, int]:
    lowest, dots, highest = value.partition("..")
    if not (dots and lowest.isdecimal() and highest.isdecimal() and 0 < int(lowest) <= int(highest)):
        msg = f"'{value}' is no range; write for instance 4..8"
        raise click.BadParameter(msg)
    return int(lowest), int(highest)


@click.command("elasticity", context_settings=CONTEXT)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Mooncake-format trace (JSONL). Default: generated {DEFAULT_WORKLOAD}.",
)
@click.option("--policy", type=click.Choice(sorted(ROUTING_POLICIES)), default="dualmap", show_default=True)
@click.option(
    "--instances", callback=_range, metavar="MIN..MAX", default="4..8", show_default=True, help="Of the pool."
)
@click.option("--rate", type=POSITIVE, default=10.0, show_default=True, help="Requests a second at first; then half.")
@click.option("--high-seconds", type=POSITIVE, default=240.0, show_default=True, help="Engine time at that rate.")
@click.option("--low-seconds", type=POSITIVE, default=420.0, show_default=True, help="Engine time at half of it.")
@click.option("--speed", type=POSITIVE, default=4.0, show_default=True, help="Engines run this much faster.")
@click.option("--output-tokens-max", type=COUNT, metavar="N", help="Cut longer answers.")
@click.option("--plot", type=DIRECTORY, help="Draw the timeline into this directory.")
@out_option
def elasticity_command(**values: object) -> None:
    """Overload a fleet of simulated engines, let the scaler add some, halve the load, and let it remove them again.

    Starts a fleet of its own, sends the load, reads the log, and reports whether attainment came back to 90% and stayed
    there, and what each step cost. Exit code 1 if it did not.

    \b
      pointsman-lab elasticity --trace toolagent.jsonl --plot /tmp/elasticity --out /tmp/elasticity.json
      pointsman-lab elasticity --instances 2..4 --rate 5 --speed 10        smaller and quicker
    """
    options = ElasticityOptions(**values)  # type: ignore[arg-type]
    configure_logging("error", "text")
    if options.plot and find_spec("matplotlib") is None:
        msg = "--plot needs matplotlib: pip install 'pointsman[plots]'"
        raise click.ClickException(msg)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_Bench(options, Console(highlight=False)).run()))


def two_phases(
    requests: Sequence[WorkloadRequest], *, rate: float, high_s: EngineSeconds, low_s: EngineSeconds
) -> list[WorkloadRequest]:
    """The workload in order, at `rate` a second and then at half of it. Shorter when requests run out."""
    high = at_rate(requests[: round(rate * high_s)], rate)
    low = at_rate(requests[len(high) : len(high) + round(rate / 2 * low_s)], rate / 2)
    first = low[0].arrival_s if low else 0.0
    return [*high, *(replace(r, arrival_s=r.arrival_s - first + high_s) for r in low)]


class _Bench:
    def __init__(self, options: ElasticityOptions, console: Console) -> None:
        self._options = options
        self._console = console

    async def run(self) -> int:
        """The exit code. Raises click.ClickException."""
        options = self._options
        requests = self._requests()
        lowest, highest = options.instances
        fresh = FreshFleet(
            policy=options.policy,
            instances=f"{lowest}..{highest}",
            speed=options.speed,
            settings=[f"scaler.scaling={SCALING}"],
            arguments=["--slo-ttft", str(SLO_TTFT_SECONDS)],
        )
        self._console.print(f"starting a fleet of {lowest} engines that may grow to {highest} ...", style="dim")
        async with fresh.running() as fleet:
            load = await self._drive(fleet, requests)
            timeline = await self._settled_timeline(fleet)
        report = self._report(load, timeline)
        self._show(report)
        return 0 if _passed(report) else MISSED_EXIT_CODE

    def _requests(self) -> list[WorkloadRequest]:
        options = self._options
        needed = round(options.rate * (options.high_seconds + options.low_seconds / 2))
        found = workload_requests(
            options.trace,
            DEFAULT_WORKLOAD,
            requests=needed,
            seed=SEED,
            rate=options.rate,
            input_tokens_max=DEFAULT_INPUT_CAP,
        )
        return two_phases(found, rate=options.rate, high_s=options.high_seconds, low_s=options.low_seconds)

    async def _drive(self, fleet: FleetFile, requests: Sequence[WorkloadRequest]) -> LoadGenerator:
        options = self._options
        target = Target(
            url=fleet.ingress.rstrip("/"),
            model=fleet.model,
            speed=options.speed,
            seed=SEED,
            slo_ttft_s=SLO_TTFT_SECONDS,
            output_tokens_max=options.output_tokens_max,
        )
        load = LoadGenerator(target, requests)
        wall = requests[-1].arrival_s / options.speed
        self._console.print(f"sending {len(requests)} requests in {wall:.0f} s, the last part at half the rate")
        shown = time.monotonic()

        def tick() -> None:
            nonlocal shown
            if time.monotonic() - shown > SHOW_SECONDS:
                shown = time.monotonic()
                tally = load.tally
                ended = dict(tally.counts)
                self._console.print(
                    f"  {tally.sent} of {tally.total} sent, {tally.in_flight} in flight, {ended}", style="dim"
                )

        await load.run(tick)
        return load

    async def _settled_timeline(self, fleet: FleetFile) -> Timeline:
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while True:
            timeline = await asyncio.to_thread(self._read, fleet)
            pending = any(drained.seconds is None and not drained.taken_back for drained in timeline.drains)
            if not pending or time.monotonic() > deadline:
                return timeline
            await asyncio.sleep(1.0)

    def _read(self, fleet: FleetFile) -> Timeline:
        settings = PoolSettings(block_tokens=fleet.block_tokens, speed=fleet.speed)
        history = LiveHistory(fleet.settings())
        return TimelineReader(settings, stretch_s=STRETCH_SECONDS).read(history.entries())

    def _report(self, load: LoadGenerator, timeline: Timeline) -> ElasticityReport:
        options, counts = self._options, load.tally.counts
        high = [s for s in timeline.stretches if s.start_s + timeline.stretch_s <= options.high_seconds]
        low = [s for s in timeline.stretches if s.start_s >= options.high_seconds]
        recovered = _recovered_at(high, TARGET)
        at_first = [size for at, size in timeline.sizes if at < 0][-1:]
        sizes = at_first + [size for at, size in timeline.sizes if at >= 0]
        changes = [c for c in timeline.changes if c.at_s > 0]
        return ElasticityReport(
            workload=workload_name(options.trace, DEFAULT_WORKLOAD),
            policy=options.policy,
            scaling=SCALING,
            speed=options.speed,
            rate=options.rate,
            halves_at_s=options.high_seconds,
            target=TARGET,
            requests=load.tally.total,
            completed=counts["completed"],
            rejected=counts["rejected"],
            failed=counts["failed"],
            smallest=min(sizes, default=0),
            largest=max(sizes, default=0),
            size_at_end=sizes[-1] if sizes else 0,
            worst_attainment=min((s.attainment for s in high if s.attainment is not None), default=None),
            recovered_s=recovered,
            high_attainment=None if recovered is None else _attainment(s for s in high if s.start_s >= recovered),
            low_attainment=_attainment(low),
            remapped_within_bound=sum(c.remapped <= c.bound for c in changes),
            changes=len(changes),
            failed_while_draining=sum(d.failed for d in timeline.drains),
            placed_after_draining=sum(d.placed_after for d in timeline.drains),
            timeline=timeline,
        )

    def _show(self, report: ElasticityReport) -> None:
        options = self._options
        self._console.print(_table(report))
        for decided in report.timeline.decisions:
            size = f"{decided.current} -> {decided.wanted}"
            self._console.print(f"  {decided.at_s:7.1f} s  {size:8} {decided.reason}", soft_wrap=True)
        if options.out:
            write_json(options.out, report)
            self._console.print(f"numbers written to {options.out}", soft_wrap=True)
        try:
            if options.plot:
                from pointsman_lab.elasticity.picture import draw_timeline

                title = (
                    f"{report.policy}, scaled by {report.scaling}: {report.workload} at {report.rate:g}/s, then half"
                )
                file = draw_timeline(report.timeline, options.plot, title=title, target=report.target)
                self._console.print(f"drawn: {file}", soft_wrap=True)
        except OSError as error:
            msg = f"cannot write {error.filename}: {error.strerror}"
            raise click.ClickException(msg) from error


def _recovered_at(stretches: Sequence[Stretch], target: float) -> EngineSeconds | None:
    recovered: EngineSeconds | None = None
    for stretch in stretches:
        if stretch.attainment is None:
            continue
        if stretch.attainment < target:
            recovered = None
        elif recovered is None:
            recovered = stretch.start_s
    return recovered


def _attainment(stretches: Iterable[Stretch]) -> float | None:
    chosen = list(stretches)
    requests = sum(s.requests for s in chosen)
    return sum(s.on_time for s in chosen) / requests if requests else None


def _passed(report: ElasticityReport) -> bool:
    return (
        report.recovered_s is not None
        and (report.low_attainment or 0.0) >= report.target
        and report.size_at_end == report.smallest < report.largest
        and report.remapped_within_bound == report.changes
        and report.failed_while_draining == report.placed_after_draining == 0
    )


def _table(report: ElasticityReport) -> Table:
    table = Table(title="elasticity", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    rows = {
        "requests": f"{report.requests}: {report.completed} completed, {report.rejected} refused, {report.failed} failed",
        "instances": f"{report.smallest} to {report.largest}, {report.size_at_end} at the end",
        "worst stretch while overloaded": _percent(report.worst_attainment),
        f"back above {report.target:.0%} after": "never"
        if report.recovered_s is None
        else f"{report.recovered_s:.0f} s",
        "on time from then until the load halves": _percent(report.high_attainment),
        "on time after the load halved": _percent(report.low_attainment),
        "steps that remapped at most 2/n + 10%": f"{report.remapped_within_bound} of {report.changes}",
        "drains": f"{len(report.timeline.drains)}: {report.failed_while_draining} requests failed, "
        f"{report.placed_after_draining} placed afterwards",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
