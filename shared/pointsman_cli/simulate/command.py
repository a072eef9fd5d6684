"""The command itself: reads what was asked for, runs every cell, and shows what came out.

Scenario flags carry the simulator's own defaults, so that `simulate` without any of them and `Scenario()` are one.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.simulation.goodput import RUNS_MAX, Goodput
from pointsman.simulation.simulator import Failure, Scenario
from pointsman.simulation.workload import ARRIVALS, GENERATORS, TraceError, mean_rate
from pointsman.state.engine_profiles import PROFILES
from pointsman_cli.options import COUNT, POSITIVE, comma_list, rates, workload_size
from pointsman_cli.output_file import OUTPUT_FILE, write_file
from pointsman_cli.simulate.experiment import (
    Cell,
    CellResult,
    Source,
    goodput_searches,
    requests_of,
    run_all,
    run_cell,
    run_search,
    search_key,
)
from pointsman_cli.simulate.report import (
    as_json,
    capacity_table,
    details_table,
    headline,
    in_order,
    reconstruction_note,
)
from pointsman_cli.simulate.variants import Variant, variants

DEFAULT_POLICIES = "dualmap,least_loaded,min_ttft,sticky_least_loaded"
DEFAULT_REQUESTS = 4000
DEFAULT_WARMUP = 500
EVICTIONS = ("lru", "rlt")
REPORT_COLUMNS = 180
"""Width of the tables where the output is no terminal."""

INTERRUPTED_EXIT_CODE = 130
AS_SIMULATED = Scenario()


def _numbers(shape: str, separator: str) -> Callable[..., tuple[tuple[float, float], ...]]:
    """A callback that reads pairs of numbers, written as `shape` says."""

    def read(
        _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
    ) -> tuple[tuple[float, float], ...]:
        pairs = []
        for text in values:
            first, found, second = text.partition(separator)
            try:
                pairs.append((float(first), float(second if found else "")))
            except ValueError as error:
                msg = f"{text}: write {shape}"
                raise click.BadParameter(msg) from error
        return tuple(pairs)

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What was asked for on the command line."""

    trace: Path | None
    workload: str | None
    policies: tuple[str, ...]
    order: tuple[str, ...]
    admission: tuple[str, ...]
    settings: tuple[str, ...]
    rebalance: str
    eviction: str
    qps: tuple[float, ...]
    arrivals: str
    requests: int
    warmup: int
    input_cap: int
    instances: int
    engine_model: str
    prefill_only: bool
    split: tuple[int, int]
    kv_tokens: int | None
    slo_ttft: float
    load_lag: float
    event_delay: float
    event_loss: float
    estimate_error: tuple[float, float]
    slow: tuple[tuple[float, float], ...]
    fail: tuple[tuple[float, float], ...]
    scale: tuple[tuple[float, float], ...]
    goodput: bool
    seeds: int
    seed: int
    jobs: int
    json_file: Path | None
    plot: Path | None


def _split(_context: click.Context, _parameter: click.Parameter, told: str | None) -> tuple[int, int]:
    """Prefill and decode instances in a flag's value. Raises click.BadParameter."""
    if told is None:
        return AS_SIMULATED.split
    prefill, plus, decode = told.partition("+")
    if not (plus and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        msg = f"'{told}' is not P+D, two numbers of at least 1; write for instance 4+4"
        raise click.BadParameter(msg)
    return int(prefill), int(decode)


NOT_NEGATIVE = click.FloatRange(min=0)
SHARE = click.FloatRange(min=0, max=1)


@click.command("simulate", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Mooncake-format trace (JSONL).")
@click.option("--workload", type=click.Choice(tuple(GENERATORS)), help="Generated workload instead of a trace.")
@click.option(
    "--policies",
    metavar="A,B,C",
    default=DEFAULT_POLICIES,
    show_default=True,
    callback=comma_list,
    help="Routing policies; NAME:SETTING=VALUE for one with settings of its own.",
)
@click.option(
    "--order",
    metavar="A,B",
    default=AS_SIMULATED.ordering,
    show_default=True,
    callback=comma_list,
    help="Who is granted first. With several, each policy runs with each.",
)
@click.option(
    "--admission",
    metavar="A,B",
    default=AS_SIMULATED.admission,
    show_default=True,
    callback=comma_list,
    help="What is refused early. With several, each policy runs with each.",
)
@click.option(
    "--set", "settings", metavar="POLICY.NAME=VALUE", multiple=True, help="A setting of a routing policy; repeatable."
)
@click.option(
    "--rebalance",
    type=click.Choice(tuple(REBALANCING_POLICIES)),
    default=AS_SIMULATED.rebalancing,
    show_default=True,
    help="How pending requests move.",
)
@click.option(
    "--eviction",
    type=click.Choice(EVICTIONS),
    default=AS_SIMULATED.eviction,
    show_default=True,
    help="What a full KV cache of an engine forgets.",
)
@click.option("--qps", metavar="4,5,6", callback=rates, help="Requests a second. Default: the workload's own rate.")
@click.option(
    "--arrivals",
    type=click.Choice(tuple(ARRIVALS)),
    default="timestamps",
    show_default=True,
    help="How requests are spread in time; timestamps: in the workload's own pattern, stretched to the rate.",
)
@workload_size(requests=DEFAULT_REQUESTS, warmup=DEFAULT_WARMUP)
@click.option(
    "--instances", type=COUNT, metavar="N", default=AS_SIMULATED.instances, show_default=True, help="Engines."
)
@click.option(
    "--engine-model",
    type=click.Choice(tuple(PROFILES)),
    default=AS_SIMULATED.profile,
    show_default=True,
    help="What they cost.",
)
@click.option(
    "--prefill-only/--decode",
    default=AS_SIMULATED.prefill_only,
    show_default=True,
    help="Answers of one token (the prefill-bound model), or whole ones that share the engine with prefills.",
)
@click.option(
    "--split",
    metavar="P+D",
    callback=_split,
    help="The first P instances only prefill and the next D only decode; implies --decode. Others do everything.",
)
@click.option("--kv-tokens", type=COUNT, metavar="N", help="KV cache of each engine. Default: the engine model's.")
@click.option(
    "--slo-ttft",
    type=POSITIVE,
    metavar="S",
    default=AS_SIMULATED.slo_ttft_s,
    show_default=True,
    help="TTFT objective, seconds.",
)
@click.option(
    "--load-lag", type=NOT_NEGATIVE, metavar="S", default=0.0, help="Policies see nothing of the last S seconds."
)
@click.option("--event-delay", type=NOT_NEGATIVE, metavar="S", default=0.0, help="Cache events come S seconds late.")
@click.option("--event-loss", type=SHARE, metavar="P", default=0.0, help="Share of cache events that are lost.")
@click.option(
    "--estimate-error",
    type=(SHARE, SHARE),
    metavar="P X",
    default=(0.0, 0.0),
    help="A share P of the prefill estimates is wrong by X (0.5: by half).",
)
@click.option(
    "--slow",
    metavar="N=X",
    multiple=True,
    callback=_numbers("INSTANCE=SPEED, such as 0=0.5", "="),
    help="Instance N (from 0) runs at X times the speed, and nobody is told; repeatable.",
)
@click.option(
    "--fail",
    metavar="N@S",
    multiple=True,
    callback=_numbers("INSTANCE@SECONDS, such as 2@120", "@"),
    help="Instance N (from 0) dies after S seconds; repeatable.",
)
@click.option(
    "--scale",
    metavar="S=N",
    multiple=True,
    callback=_numbers("SECONDS=INSTANCES, such as 300=12", "="),
    help="After S seconds there are to be N instances; repeatable.",
)
@click.option(
    "--goodput",
    is_flag=True,
    help=f"Also search the highest rate at which nine in ten are on time (up to {RUNS_MAX} more runs each).",
)
@click.option("--seeds", type=COUNT, metavar="N", default=1, show_default=True, help="Run everything N times.")
@click.option("--seed", type=int, default=1, show_default=True, help="The first of the seeds.")
@click.option(
    "--jobs", type=COUNT, metavar="N", default=lambda: os.cpu_count() or 1, help="Processes. Default: one a core."
)
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write the numbers here.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Draw pictures into this directory.")
def simulate_command(**values: object) -> None:
    """Compare policies on the same requests in virtual time: the production code, thousands of times faster.

    State, policies, admission, ordering and engine model are those that the services run. Equal seeds give equal
    numbers, on every machine.

    \b
      pointsman simulate --workload chat --policies dualmap,min_ttft
      pointsman simulate --trace conversation.jsonl --policies dualmap,min_ttft --qps 4,5,6,7
      pointsman simulate --trace conversation.jsonl --policies dualmap --order fcfs,edf --admission none,predicted_ttft
      pointsman simulate --trace conversation.jsonl --policies dualmap,dualmap:both_over=least_loaded --goodput
      pointsman simulate --trace conversation.jsonl --qps 5,6,7 --seeds 3 --json runs.json --plot pictures
      pointsman simulate --workload chat --qps 6 --instances 4 --scale 200=8 --plot pictures

    Effective request capacity is the share of all requests whose first token met the objective; refused ones count
    as missed. Goodput is the highest rate at which it stays at 90% or above.
    """
    options = SimulateOptions(**values)  # type: ignore[arg-type]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, REPORT_COLUMNS)
    sys.exit(_Simulate(options, console).run())


class _Simulate:
    """The whole command. Ctrl-C keeps what has been simulated so far."""

    def __init__(self, options: SimulateOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._variants = _variants(options)
        self._source = _source(options)
        self._interrupted = False

    def run(self) -> int:
        """The exit code. Raises click.ClickException."""
        options = self._options
        plots = _plots() if options.plot else None
        cells = self._cells()
        results, goodputs = self._simulated(cells)
        if not results:
            self._console.print("nothing was simulated")
            return INTERRUPTED_EXIT_CODE
        results = in_order(results, cells)
        self._show(results, goodputs)
        if options.json_file:
            write_file(options.json_file, as_json(results, goodputs))
            self._console.print(f"numbers written to {options.json_file}", soft_wrap=True)
        if options.plot and plots:
            self._draw(plots, results, options.plot)
        return INTERRUPTED_EXIT_CODE if self._interrupted else 0

    def _cells(self) -> list[Cell]:
        """Every run of the sweep: seeds within rates within variants."""
        options = self._options
        try:
            requests = requests_of(self._source, options.seed)
        except TraceError as error:
            raise click.ClickException(str(error)) from error
        if len(requests) <= options.warmup:
            msg = f"{len(requests)} requests, of which the first {options.warmup} are not counted: nothing is left; lower --warmup"
            raise click.UsageError(msg)
        rates = options.qps or (round(mean_rate(requests), 3),)
        base = _scenario(options)
        return [
            Cell(
                source=self._source,
                variant=variant,
                scenario=replace(
                    base,
                    routing=variant.routing,
                    routing_settings=variant.settings,
                    ordering=variant.ordering,
                    admission=variant.admission,
                    seed=seed,
                ),
                qps=qps,
                warmup=options.warmup,
            )
            for variant in self._variants
            for qps in rates
            for seed in range(options.seed, options.seed + options.seeds)
        ]

    def _simulated(self, cells: Sequence[Cell]) -> tuple[list[CellResult], dict[tuple[str, int], Goodput]]:
        results: list[CellResult] = []
        goodputs: dict[tuple[str, int], Goodput] = {}
        searches = len(self._variants) * self._options.seeds if self._options.goodput else 0
        try:
            with _progress(self._console, len(cells) + searches) as done:
                for result in run_all(run_cell, cells, self._options.jobs):
                    results.append(result)
                    done(_said(result))
                if searches:
                    for search, goodput in run_all(run_search, goodput_searches(results), self._options.jobs):
                        goodputs[search_key(search.cell)] = goodput
                        done(f"{search.cell.variant.policy}: goodput {goodput.qps:.2f}/s")
        except KeyboardInterrupt:
            self._interrupted = True
        except BrokenProcessPool as error:
            if not results:
                msg = "a simulating process died; was there enough memory? --jobs 1 shows more"
                raise click.ClickException(msg) from error
            self._interrupted = True
        return results, goodputs

    def _show(self, results: Sequence[CellResult], goodputs: dict[tuple[str, int], Goodput]) -> None:
        console = self._console
        console.print(headline(results[0], self._options.seeds), soft_wrap=True)
        if note := reconstruction_note(self._source):
            console.print(note, soft_wrap=True)
        console.print(capacity_table(results, goodputs))
        for qps in sorted({result.cell.qps for result in results}):
            console.print(details_table(results, qps))
        if self._interrupted:
            console.print(Text("interrupted: what is missing above was not simulated", style="yellow"))

    def _draw(self, plots: "Plots", results: Sequence[CellResult], directory: Path) -> None:
        try:
            pictures = plots(results, directory)
        except OSError as error:
            msg = f"cannot draw into {directory}: {error.strerror}"
            raise click.ClickException(msg) from error
        for picture in pictures:
            self._console.print(f"drew {picture}", soft_wrap=True)


def _variants(options: SimulateOptions) -> list[Variant]:
    try:
        return variants(options.policies, options.order, options.admission, options.settings)
    except UnknownPolicyError as error:
        raise click.UsageError(str(error)) from error


def _source(options: SimulateOptions) -> Source:
    if (options.trace is None) == (options.workload is None):
        msg = "give --trace or --workload, one of them"
        raise click.UsageError(msg)
    return Source(
        trace=options.trace,
        generator=options.workload or "",
        requests=options.requests,
        input_tokens_max=options.input_cap,
        arrivals=options.arrivals,
    )


def _scenario(options: SimulateOptions) -> Scenario:
    """What all runs have in common. Raises click.UsageError for instances that there are not."""
    for number, _ in (*options.slow, *options.fail):
        if number not in range(options.instances):
            msg = f"there is no instance {number:g}; they count from 0 to {options.instances - 1}"
            raise click.UsageError(msg)
    if any(speed <= 0 for _, speed in options.slow):
        msg = "--slow: a speed is positive"
        raise click.UsageError(msg)
    if any(wanted < 1 for _, wanted in options.scale):
        msg = "--scale: at least one instance must remain"
        raise click.UsageError(msg)
    if sum(options.split) > options.instances:
        msg = f"--split {'+'.join(map(str, options.split))} needs {sum(options.split)} instances; see --instances"
        raise click.UsageError(msg)
    return Scenario(
        instances=options.instances,
        profile=options.engine_model,
        rebalancing=options.rebalance,
        eviction=options.eviction,
        slo_ttft_s=options.slo_ttft,
        prefill_only=options.prefill_only and options.split == AS_SIMULATED.split,
        split=options.split,
        kv_capacity_tokens=options.kv_tokens,
        load_lag_s=options.load_lag,
        event_delay_s=options.event_delay,
        event_loss=options.event_loss,
        estimate_error=options.estimate_error,
        slow_instances={int(number): speed for number, speed in options.slow},
        failures=tuple(Failure(at=at, instance=int(number)) for number, at in options.fail),
        scale_at=tuple((at, int(wanted)) for at, wanted in options.scale),
    )


def _said(result: CellResult) -> str:
    cell, capacity = result.cell, result.report.effective_capacity
    shown = "-" if capacity is None else f"{capacity:.3f}"
    return f"{cell.variant.policy} at {cell.qps:g}/s, seed {cell.scenario.seed}: {shown}"


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, a line for each finished run elsewhere. Gives what to call when one is done."""
    if not console.is_terminal:
        finished = iter(range(1, total + 1))
        yield lambda said: console.print(f"[{next(finished)}/{total}] {said}", markup=False)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda said: progress.update(task, advance=1, description=said)


Plots = Callable[[Sequence[CellResult], Path], list[Path]]


def _plots() -> Plots:
    """What draws, asked for before anything is simulated: a long run must not end with a missing package."""
    try:
        from pointsman_cli.simulate.plots import draw_plots
    except ImportError as error:
        msg = "--plot needs matplotlib; install it with: pip install 'pointsman[plots]'"
        raise click.ClickException(msg) from error
    return draw_plots
