"""Options in; tables, JSON and pictures of every simulated cell out. Defaults are the simulator's own: `simulate`
without options equals `Scenario()`."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.scaling.roles import parse_split
from pointsman.simulation.goodput import RUNS_MAX, Goodput
from pointsman.simulation.simulator import Scenario
from pointsman.simulation.workload import mean_rate
from pointsman_cli.interruption import INTERRUPTED_EXIT_CODE
from pointsman_cli.options import (
    CONTEXT,
    COUNT,
    DEFAULT_INPUT_CAP,
    DIRECTORY,
    INSTANCES,
    NOT_NEGATIVE,
    WHOLE,
    comma_list,
    out_option,
    rates,
)
from pointsman_cli.output_file import write_file
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.simulate.drawing import drawing
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
    details_tables,
    headline,
    in_order,
    reconstruction_note,
)
from pointsman_cli.simulate.variants import Variant, variants
from pointsman_cli.terminal import SafeConsole
from pointsman_cli.workload_options import check_one_workload, workload_options

WARMUP_MAX = 500
DEFAULT_POLICIES = "dualmap,least_loaded,min_ttft,sticky_least_loaded"
REPORT_COLUMNS = 180
FIRST_SEED = 1
DEFAULTS = Scenario()
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    trace: Path | None
    workload: str | None
    policies: tuple[str, ...]
    order: tuple[str, ...]
    admission: tuple[str, ...]
    settings: tuple[str, ...]
    rebalance: str
    rates: tuple[float, ...]
    requests: int
    warmup: int | None
    instances: int
    split: tuple[int, int] | None
    transfer_tokens_per_s: float
    decode: bool
    host_cache_tokens: int
    goodput: bool
    seeds: int
    jobs: int
    out: Path | None
    plot: Path | None


def _split(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Numbers of prefill and decode instances; None: the scaler chooses. Raises click.BadParameter."""
    if value is None:
        return DEFAULTS.split
    if value == AUTO:
        return None
    try:
        sizes = parse_split(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return sizes.prefill, sizes.decode


@click.command("simulate", context_settings=CONTEXT)
@workload_options
@click.option(
    "--policy",
    "policies",
    metavar="A[,B]",
    default=DEFAULT_POLICIES,
    show_default=True,
    callback=comma_list,
    help="Routing policies.",
)
@click.option(
    "--order",
    metavar="A[,B]",
    default=DEFAULTS.ordering,
    show_default=True,
    callback=comma_list,
    help="Which request is granted first. With several, each policy runs with each.",
)
@click.option(
    "--admission",
    metavar="A[,B]",
    default=DEFAULTS.admission,
    show_default=True,
    callback=comma_list,
    help="Which requests are rejected early. With several, each policy runs with each.",
)
@click.option(
    "--rebalance",
    type=click.Choice(tuple(REBALANCING_POLICIES)),
    default=DEFAULTS.rebalancing,
    show_default=True,
    help="How pending requests move.",
)
@click.option(
    "--set",
    "settings",
    metavar="KIND.NAME=A[,B]",
    multiple=True,
    help="A setting: routing.NAME, order.NAME, admission.NAME or POLICY.NAME. With several values, run with each. Repeatable.",
)
@click.option(
    "--rate", "rates", metavar="R[,R]", callback=rates, help="Requests a second. Default: the workload's own."
)
@click.option("--requests", type=COUNT, metavar="N", default=4000, show_default=True, help="At most.")
@click.option(
    "--warmup",
    type=WHOLE,
    metavar="N",
    help=f"The first N requests fill the caches and are not counted. Default: {WARMUP_MAX}, or half of a smaller run.",
)
@click.option(
    "--instances", type=INSTANCES, metavar="N", default=DEFAULTS.instances, show_default=True, help="Engines."
)
@click.option(
    "--split",
    metavar="P+D",
    callback=_split,
    help="The first P instances only prefill and the next D only decode; implies --decode. Others do everything. 'auto': "
    "half of them each, and the scaler (slo_attainment) switches roles with the load.",
)
@click.option(
    "--transfer-tokens-per-s",
    type=NOT_NEGATIVE,
    metavar="N",
    default=DEFAULTS.transfer_tokens_per_s,
    help="Instances fetch prefixes from each other, each source at this rate; 0: they do not. Default: 0.",
)
@click.option(
    "--decode", is_flag=True, help="Whole answers, which share the engine with prefills. Default: answers of one token."
)
@click.option(
    "--host-cache-tokens",
    type=WHOLE,
    metavar="N",
    default=DEFAULTS.host_cache_tokens,
    show_default=True,
    help="Host memory of each engine for KV blocks that its device evicted.",
)
@click.option(
    "--goodput",
    is_flag=True,
    help=f"Also search the highest rate at which 90% are on time (up to {RUNS_MAX} more runs each).",
)
@click.option("--seeds", type=COUNT, metavar="N", default=1, show_default=True, help="Run everything N times.")
@click.option(
    "--jobs", type=COUNT, metavar="N", default=lambda: os.cpu_count() or 1, help="Processes. Default: one a core."
)
@click.option("--plot", type=DIRECTORY, help="Draw pictures into this directory.")
@out_option
def simulate_command(**values: object) -> None:
    """Compare policies on the same requests in virtual time: the production code, thousands of times faster.

    State, policies, admission, ordering and engine model are those that the services run. Equal seeds give equal
    numbers, on every machine.

    \b
      pointsman simulate --workload chat --policy dualmap,min_ttft
      pointsman simulate --trace conversation.jsonl --policy dualmap,min_ttft --rate 4,5,6,7
      pointsman simulate --trace conversation.jsonl --policy dualmap --order fcfs,edf --admission none,predicted_ttft
      pointsman simulate --trace conversation.jsonl --policy dualmap --set dualmap.both_over=affine,least_loaded --goodput
      pointsman simulate --trace conversation.jsonl --rate 5,6,7 --seeds 3 --out runs.json --plot pictures

    Effective request capacity is the share of all requests whose first token met the SLO; rejected ones count as
    missed. Goodput is the highest rate at which it stays at 90% or above.
    """
    options = SimulateOptions(**values)  # type: ignore[arg-type]
    console = SafeConsole()
    if not console.is_terminal:
        console.width = max(console.width, REPORT_COLUMNS)
    sys.exit(_Simulate(options, console).run())


class _Simulate:
    def __init__(self, options: SimulateOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._variants = _variants(options)
        self._source = _source(options)
        self._interrupted = False

    def run(self) -> int:
        """The exit code. Raises click.ClickException."""
        options = self._options
        draw = drawing(self._console, options.plot) if options.plot else None
        cells = self._cells()
        results, goodputs = self._simulated(cells)
        if not results:
            self._console.print("nothing was simulated")
            return INTERRUPTED_EXIT_CODE
        results = in_order(results, cells)
        self._show(results, goodputs)
        if options.out:
            write_file(options.out, as_json(results, goodputs))
            self._console.print(f"numbers written to {options.out}", soft_wrap=True)
        if draw:
            draw(results)
        return INTERRUPTED_EXIT_CODE if self._interrupted else 0

    def _cells(self) -> list[Cell]:
        options = self._options
        requests = requests_of(self._source, FIRST_SEED)
        warmup = min(WARMUP_MAX, len(requests) // 2) if options.warmup is None else options.warmup
        if len(requests) <= warmup:
            raise click.UsageError(
                f"{len(requests)} requests, of which the first {warmup} are not counted: nothing is left; lower --warmup"
            )
        rates = options.rates or (round(mean_rate(requests), 3),)
        base = _scenario(options)
        return [
            Cell(
                source=self._source,
                variant=variant,
                scenario=variant.applied_to(replace(base, seed=seed)),
                qps=qps,
                warmup=warmup,
            )
            for variant in self._variants
            for qps in rates
            for seed in range(FIRST_SEED, FIRST_SEED + options.seeds)
        ]

    def _simulated(self, cells: Sequence[Cell]) -> tuple[list[CellResult], dict[tuple[str, int], Goodput]]:
        results: list[CellResult] = []
        goodputs: dict[tuple[str, int], Goodput] = {}
        searches = len(self._variants) * self._options.seeds if self._options.goodput else 0
        try:
            total = len(cells) + searches
            with progress_bar(self._console, total) as update:
                for result in run_all(run_cell, cells, self._options.jobs):
                    results.append(result)
                    update(len(results), _summary(result))
                if searches:
                    for search, goodput in run_all(run_search, goodput_searches(results), self._options.jobs):
                        goodputs[search_key(search.cell)] = goodput
                        update(
                            len(results) + len(goodputs), f"{search.cell.variant.policy}: goodput {goodput.qps:.2f}/s"
                        )
        except KeyboardInterrupt:
            self._interrupted = True
        except BrokenProcessPool as error:
            if not results:
                raise click.ClickException(
                    "a simulating process died, perhaps for lack of memory; --jobs 1 shows more"
                ) from error
            self._interrupted = True
        return results, goodputs

    def _show(self, results: Sequence[CellResult], goodputs: dict[tuple[str, int], Goodput]) -> None:
        console = self._console
        console.print(headline(results[0], self._options.seeds), soft_wrap=True)
        if note := reconstruction_note(self._source):
            console.print(note, soft_wrap=True)
        console.print(capacity_table(results, goodputs))
        for qps in sorted({result.cell.qps for result in results}):
            console.print(*details_tables(results, qps))
        if self._interrupted:
            console.print(Text("interrupted: what is missing above was not simulated", style="yellow"))


def _variants(options: SimulateOptions) -> list[Variant]:
    try:
        return variants(options.policies, options.order, options.admission, options.settings)
    except UnknownPolicyError as error:
        raise click.UsageError(str(error)) from error


def _source(options: SimulateOptions) -> Source:
    check_one_workload(options.trace, options.workload)
    return Source(
        trace=options.trace,
        generator=options.workload or "",
        requests=options.requests,
        input_tokens_max=DEFAULT_INPUT_CAP,
    )


def _scenario(options: SimulateOptions) -> Scenario:
    """The scenario that all runs share. Raises click.UsageError."""
    split = options.split or (options.instances // 2, options.instances - options.instances // 2)
    if sum(split) > options.instances or (options.split is None and 0 in split):
        raise click.UsageError(f"--split needs {max(2, sum(split))} instances; see --instances")
    if options.transfer_tokens_per_s and options.split != DEFAULTS.split:
        raise click.UsageError(
            "--transfer-tokens-per-s is of instances that do both parts of a request: give it without --split"
        )
    return Scenario(
        instances=options.instances,
        rebalancing=options.rebalance,
        prefill_only=not options.decode and options.split == DEFAULTS.split,
        host_cache_tokens=options.host_cache_tokens,
        split=split,
        role_switching=options.split is None,
        transfer_tokens_per_s=options.transfer_tokens_per_s,
    )


def _summary(result: CellResult) -> str:
    cell, capacity = result.cell, result.report.effective_capacity
    shown = "-" if capacity is None else f"{capacity:.3f}"
    return f"{cell.variant.policy} at {cell.qps:g}/s, seed {cell.scenario.seed}: {shown}"
