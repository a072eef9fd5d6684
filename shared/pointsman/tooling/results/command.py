"""`pointsman results`: run the studies, write `results.md`, its pictures and its numbers."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pointsman.simulation.central_queue import CentralOrder, central_queue
from pointsman.simulation.goodput import Goodput, RatePoint
from pointsman.simulation.metrics import effective_capacity
from pointsman.simulation.simulator import Scenario
from pointsman.simulation.workload import at_rate
from pointsman.tooling.results.page import Bounds, Goodputs, margins, row_name, study_section
from pointsman.tooling.results.studies import CONVERSATION, TOOL_AGENT, WARMUP, Study, studies
from pointsman.tooling.simulate.experiment import (
    Cell,
    CellResult,
    GoodputSearch,
    Source,
    requests_of,
    run_all,
    run_cell,
    run_search,
)
from pointsman.tooling.simulate.plots import draw_plots

ORDERS: tuple[CentralOrder, ...] = ("fcfs", "most_on_time")

INTRODUCTION = """# Results

Made by one command, `make results`, on a machine with two cores; every number on this page and every picture comes from
that run, in virtual time, deterministic for its seeds. Effective capacity is the share of all requests whose first token
met the objective of 5 s; refused ones count as missed. Hit rates are token-weighted and reported by the engine model.

The *conversation* trace is the one published with Mooncake (first 4,000 requests, input capped at 20,480 tokens, the
first 500 as warm-up). The *tool-and-agent* trace is **a reconstruction, not the published one**: conversation rows with
two hot tool prefixes in the shares that DualMap's Figure 6 gives. Arrivals are spread inside the traces' 3-second buckets
by seed and scaled to a rate. Nothing is tuned per trace, rate or workload.

`dualmap` keeps affinity where both candidates would be late and calls a prefix hot above 1/n of the traffic;
`dualmap:both_over=least_loaded` is the paper's text, with its threshold of 2/n.
"""


@dataclass(frozen=True, slots=True)
class BoundJob:
    """The central queue at one rate with one seed."""

    study: str
    source: Source
    order: CentralOrder
    qps: float
    seed: int


@click.command("results")
@click.option(
    "--traces",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help=f"Directory with {CONVERSATION} and {TOOL_AGENT}.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs"),
    help="Where results.md and results/ go.",
)
@click.option("--only", default="", help="Only studies whose key contains this; nothing is written then, only shown.")
@click.option("--jobs", default=os.cpu_count() or 1, help="Simulations at once.")
def results_command(traces: Path, out: Path, only: str, jobs: int) -> None:
    """Run every study of docs/results.md and write the page anew (under half an hour on two cores).

    \b
    Examples:
      pointsman results --traces ../shared/traces
      pointsman results --traces ../shared/traces --only lag
    """
    missing = [name for name in (CONVERSATION, TOOL_AGENT) if not (traces / name).is_file()]
    if missing:
        message = f"{traces} has no {' and no '.join(missing)}"
        raise click.UsageError(message)
    console = Console()
    chosen = [study for study in studies(traces) if only in study.key]
    if not chosen:
        message = f"no study has '{only}' in its key; there are: {', '.join(study.key for study in studies(traces))}"
        raise click.UsageError(message)
    found = _Runs(chosen, jobs, console)
    sections = [
        study_section(study, found.results[study.key], found.goodputs[study.key], found.bounds[study.key])
        for study in chosen
    ]
    if only:
        console.print("\n".join(sections), markup=False, soft_wrap=True)
        return
    _write(out, chosen, sections, found)
    console.print(f"wrote {out / 'results.md'}")


class _Runs:
    """All simulations of the chosen studies, made at once with one progress bar."""

    def __init__(self, chosen: Sequence[Study], jobs: int, console: Console) -> None:
        self.results: dict[str, list[CellResult]] = {}
        self.goodputs: dict[str, Goodputs] = {}
        self.bounds: dict[str, Bounds] = {}
        cells = [(study.key, cell) for study in chosen for cell in study.cells()]
        bounds = [job for study in chosen if study.bound for job in _bound_jobs(study)]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            by_cell = self._simulated(cells, jobs, progress)
            for study in chosen:
                self.results[study.key] = [by_cell[study.key, _mark(cell)] for cell in study.cells()]
            self._search(chosen, jobs, progress)
            self._find_bounds(chosen, bounds, jobs, progress)

    def _simulated(
        self, cells: Sequence[tuple[str, Cell]], jobs: int, progress: Progress
    ) -> dict[tuple[str, str], CellResult]:
        task = progress.add_task("simulating", total=len(cells))
        found = {}
        for key, result in run_all(_run_keyed, cells, jobs):
            found[key, _mark(result.cell)] = result
            progress.advance(task)
        return found

    def _search(self, chosen: Sequence[Study], jobs: int, progress: Progress) -> None:
        searches = [
            (study.key, search) for study in chosen if study.goodput for search in _searches(self.results[study.key])
        ]
        task = progress.add_task("goodput", total=len(searches))
        goodputs: dict[str, dict[tuple[str, int], Goodput]] = {study.key: {} for study in chosen}
        for key, search, goodput in run_all(_search_keyed, searches, jobs):
            goodputs[key][row_name(search.cell.variant), search.cell.scenario.seed] = goodput
            progress.advance(task)
        self.goodputs.update(goodputs)

    def _find_bounds(self, chosen: Sequence[Study], bounds: Sequence[BoundJob], jobs: int, progress: Progress) -> None:
        task = progress.add_task("bounds", total=len(bounds))
        values: dict[tuple[str, str, float], list[float]] = {}
        for job, capacity in run_all(_run_bound, bounds, jobs):
            values.setdefault((job.study, job.order, job.qps), []).append(capacity)
            progress.advance(task)
        for study in chosen:
            self.bounds[study.key] = {
                order: {rate: fmean(values[study.key, order, rate]) for rate in study.rates}
                for order in ORDERS
                if study.bound
            }


def _run_keyed(job: tuple[str, Cell]) -> tuple[str, CellResult]:
    return job[0], run_cell(job[1])


def _search_keyed(job: tuple[str, GoodputSearch]) -> tuple[str, GoodputSearch, Goodput]:
    search, goodput = run_search(job[1])
    return job[0], search, goodput


def _run_bound(job: BoundJob) -> tuple[BoundJob, float]:
    requests = at_rate(requests_of(job.source, job.seed), job.qps)
    outcome = central_queue(Scenario(seed=job.seed), requests, job.order)
    return job, effective_capacity(outcome.rows[WARMUP:]) or 0.0


def _bound_jobs(study: Study) -> list[BoundJob]:
    return [
        BoundJob(study.key, study.source, order, qps, seed)
        for order in ORDERS
        for qps in study.rates
        for seed in study.seeds
    ]


def _searches(results: Sequence[CellResult]) -> list[GoodputSearch]:
    """One search for each variant and seed, with what the sweep has already found."""
    known: dict[tuple[str, int], list[CellResult]] = {}
    for result in results:
        known.setdefault((row_name(result.cell.variant), result.cell.scenario.seed), []).append(result)
    return [
        GoodputSearch(group[0].cell, tuple(RatePoint(r.cell.qps, r.report.effective_capacity or 0.0) for r in group))
        for group in known.values()
    ]


def _mark(cell: Cell) -> str:
    return f"{row_name(cell.variant)} {cell.qps} {cell.scenario.seed}"


def _write(out: Path, chosen: Sequence[Study], sections: Sequence[str], found: _Runs) -> None:
    pictures_dir = out / "results"
    pictures_dir.mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION, "## `pointsman` against the best other policy", "", margins(found.results, chosen), ""]
    for study, section in zip(chosen, sections, strict=True):
        parts.append(section)
        if study.pictures:
            pictures = draw_plots(found.results[study.key], pictures_dir / study.key)
            parts += [f"![{picture.stem}](results/{study.key}/{picture.name})\n" for picture in pictures]
    (out / "results.md").write_text("\n".join(parts))
    numbers = {
        study.key: [
            {
                "policy": row_name(result.cell.variant),
                "qps": result.cell.qps,
                "seed": result.cell.scenario.seed,
                "effective_capacity": result.report.effective_capacity,
                "hit_rate": result.report.hit_rate,
            }
            for result in found.results[study.key]
        ]
        for study in chosen
    }
    (pictures_dir / "results.json").write_text(json.dumps(msgspec.to_builtins(numbers), separators=(",", ":")) + "\n")
