"""Runs every simulation of the chosen studies on all cores, with one progress bar. Shared runs are made once; goodput
searches start from the sweeps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from rich.console import Console

from pointsman.simulation.goodput import Goodput, RatePoint, find_goodput
from pointsman.simulation.metrics import effective_capacity
from pointsman.simulation.simulator import Scenario
from pointsman.simulation.workload import at_rate
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.simulate.experiment import (
    Cell,
    CellResult,
    GoodputSearch,
    Source,
    goodput_searches,
    requests_of,
    run_all,
    run_cell,
    run_search,
    search_key,
)
from pointsman_lab.results.central_queue import central_queue
from pointsman_lab.results.numbers import Numbers, StudyNumbers, study_numbers
from pointsman_lab.results.study import BOUNDS, WARMUP, Study

SEARCH_RUNS = 3.5
NEAR_SHARE = 0.7
SAMPLES_SKIPPED = 10

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BoundJob:
    study: str
    source: Source
    bound: str
    rates: tuple[float, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Bound:
    job: BoundJob
    capacity: tuple[float, ...]
    goodput: Goodput | None


@dataclass(slots=True)
class Runs:
    results: dict[str, list[CellResult]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=lambda: Numbers(taste=False, studies={}))


def run_studies(chosen: Sequence[Study], jobs: int, console: Console, *, taste: bool) -> Runs:
    once = {_mark(cell): cell for study in chosen for cell in study.cells()}
    in_full = {_mark(cell) for study in chosen if study.drawn or study.windows for cell in study.cells()}
    bounds = [job for study in chosen for job in _bound_jobs(study)]
    searching = sum(
        SEARCH_RUNS * cost(cell)
        for study in chosen
        for cell in study.cells()
        if cell.variant.called in study.goodput and cell.qps == study.rates[0]
    )
    runs = Runs()
    total = sum(map(cost, once.values())) + searching
    completed = 0.0
    with progress_bar(console, total, f"{len(once)} runs of {len(chosen)} studies", counts=False) as update:

        def advance(done: float) -> None:
            nonlocal completed
            completed += done
            update(completed, "")

        by_mark = _simulated([(cell, mark in in_full) for mark, cell in once.items()], jobs, advance)
        for study in chosen:
            # The run may have been made for another study, where its row has another name.
            runs.results[study.key] = [replace(by_mark[_mark(cell)], cell=cell) for cell in study.cells()]
        goodputs = _searched(chosen, runs.results, jobs, advance)
        found = list(run_all(_run_bound, bounds, jobs))
    runs.numbers = Numbers(
        taste=taste,
        studies={
            study.key: _with_bounds(
                study_numbers(study, runs.results[study.key], goodputs[study.key]),
                [bound for bound in found if bound.job.study == study.key],
            )
            for study in chosen
        },
    )
    return runs


def cost(cell: Cell) -> float:
    scenario = cell.scenario
    folds_twice = 1.7 if scenario.load_lag_s else 1.0
    decodes = 1.0 if scenario.prefill_only else 1.5
    return cell.source.requests * (0.8 + scenario.instances / 40) * folds_twice * decodes


def _mark(cell: Cell) -> str:
    return repr((cell.source, cell.scenario, cell.qps, cell.warmup))


def _simulated(cells: Sequence[tuple[Cell, bool]], jobs: int, advance: Advance) -> dict[str, CellResult]:
    found = {}
    for result in run_all(_run, cells, jobs):
        found[_mark(result.cell)] = result
        advance(cost(result.cell))
    return found


def _run(job: tuple[Cell, bool]) -> CellResult:
    cell, in_full = job
    result = run_cell(cell)
    if in_full:
        return result
    return replace(result, series=replace(result.series, arrivals=(), samples=result.series.samples[::SAMPLES_SKIPPED]))


def _searched(
    chosen: Sequence[Study], results: Mapping[str, Sequence[CellResult]], jobs: int, advance: Advance
) -> dict[str, dict[tuple[str, int], Goodput]]:
    asked = [
        (study.key, search)
        for study in chosen
        for search in goodput_searches(r for r in results[study.key] if r.cell.variant.called in study.goodput)
    ]
    searches = [(key, search) for key, search in asked if _is_near(search)]
    for _, search in asked:
        if not _is_near(search):
            advance(SEARCH_RUNS * cost(search.cell))
    goodputs: dict[str, dict[tuple[str, int], Goodput]] = {study.key: {} for study in chosen}
    for key, search, goodput in run_all(_search_keyed, searches, jobs):
        goodputs[key][search_key(search.cell)] = goodput
        advance(SEARCH_RUNS * cost(search.cell))
    return goodputs


def _is_near(search: GoodputSearch) -> bool:
    return any(point.effective_capacity >= NEAR_SHARE for point in search.known)


def _search_keyed(job: tuple[str, GoodputSearch]) -> tuple[str, GoodputSearch, Goodput]:
    return job[0], *run_search(job[1])


# --- The bound ---


def _bound_jobs(study: Study) -> list[BoundJob]:
    rates = tuple(study.rates)
    return [BoundJob(study.key, study.source, bound, rates, seed) for bound in study.bounds for seed in study.seeds]


def _run_bound(job: BoundJob) -> Bound:
    requests = requests_of(job.source, job.seed)
    order, floor = BOUNDS[job.bound]

    def capacity_at(qps: float) -> float:
        outcome = central_queue(Scenario(seed=job.seed), at_rate(requests, qps), order, decile_floor=floor)
        return effective_capacity(outcome.rows[WARMUP:]) or 0.0

    capacity = tuple(capacity_at(qps) for qps in job.rates)
    if order == "fcfs":
        return Bound(job, capacity, None)
    known = [RatePoint(qps, share) for qps, share in zip(job.rates, capacity, strict=True)]
    return Bound(job, capacity, find_goodput(capacity_at, start_qps=job.rates[-1], known=known))


def _with_bounds(numbers: StudyNumbers, bounds: Sequence[Bound]) -> StudyNumbers:
    for name in BOUNDS:
        own = [bound for bound in bounds if bound.job.bound == name]
        if own:
            shares = zip(*(bound.capacity for bound in own), strict=True)
            numbers.bounds[name] = [round(fmean(at_one_rate), 4) for at_one_rate in shares]
            numbers.bound_goodput[name] = [round(bound.goodput.qps, 3) for bound in own if bound.goodput]
    return numbers
