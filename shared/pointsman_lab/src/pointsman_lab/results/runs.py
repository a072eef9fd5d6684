"""Runs every simulation of the chosen studies on all cores, with one progress bar. Shared runs are made once; goodput
searches start from the sweeps."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar

from rich.console import Console

from pointsman.simulation.goodput import Goodput, RatePoint, find_goodput
from pointsman.simulation.metrics import effective_capacity
from pointsman.simulation.simulator import Scenario
from pointsman.simulation.workload import ARRIVALS, WorkloadRequest
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
from pointsman_lab.results.study import BOUND_FCFS, BOUNDS, WARMUP, CentralQueue, Measurement, Study

SEARCH_RUNS = 3.5
NEAR_SHARE = 0.7
SAMPLES_SKIPPED = 10

V = TypeVar("V")

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BoundJob:
    study: str
    source: Source
    bound: str
    rates: tuple[float, ...]
    seed: int
    searched: bool
    """For its goodput."""


@dataclass(frozen=True, slots=True)
class Bound:
    job: BoundJob
    capacity: tuple[float, ...]
    goodput: Goodput | None


@dataclass(slots=True)
class Runs:
    results: dict[str, list[CellResult]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=lambda: Numbers(taste=False, studies={}))
    seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each study and measurement; runs that several studies share count for the first."""

    def account(self, key: str, seconds: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


def run_studies(
    chosen: Sequence[Study],
    jobs: int,
    console: Console,
    *,
    taste: bool,
    measurements: Sequence[Measurement] = (),
    traces: Path = Path(),
) -> Runs:
    first: dict[str, str] = {}
    once = {_mark(cell): cell for study in chosen for cell in study.cells()}
    for study in chosen:
        for cell in study.cells():
            first.setdefault(_mark(cell), study.key)
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

        by_mark: dict[str, CellResult] = {}
        for timed in run_all(_run, [(cell, mark in in_full) for mark, cell in once.items()], jobs):
            mark = _mark(timed.value.cell)
            by_mark[mark] = timed.value
            runs.account(first[mark], timed.seconds)
            advance(cost(timed.value.cell))
        for study in chosen:
            # The run may have been made for another study, where its row has another name.
            runs.results[study.key] = [replace(by_mark[_mark(cell)], cell=cell) for cell in study.cells()]
        goodputs = _searched(chosen, runs, jobs, advance)
        found = []
        for bound in run_all(_run_bound, bounds, jobs):
            found.append(bound.value)
            runs.account(bound.value.job.study, bound.seconds)
        measured = {}
        for outcome in run_all(_measure, [(one, traces) for one in measurements], jobs):
            key, values = outcome.value
            measured[key] = values
            runs.account(key, outcome.seconds)
    runs.numbers = Numbers(
        taste=taste,
        studies={
            study.key: _with_bounds(
                study_numbers(study, runs.results[study.key], goodputs[study.key]),
                [bound for bound in found if bound.job.study == study.key],
            )
            for study in chosen
        },
        measurements={one.key: measured[one.key] for one in measurements},
    )
    return runs


def cost(cell: Cell) -> float:
    scenario = cell.scenario
    folds_twice = 1.7 if scenario.load_lag_s else 1.0
    decodes = 1.0 if scenario.prefill_only else 1.5
    return cell.source.requests * (0.8 + scenario.instances / 40) * folds_twice * decodes


def _mark(cell: Cell) -> str:
    return repr((cell.source, cell.scenario, cell.qps, cell.warmup))


@dataclass(frozen=True, slots=True)
class Timed(Generic[V]):
    value: V
    seconds: float


def _run(job: tuple[Cell, bool]) -> Timed[CellResult]:
    cell, in_full = job
    began = time.process_time()
    result = run_cell(cell)
    if not in_full:
        series = replace(result.series, arrivals=(), samples=result.series.samples[::SAMPLES_SKIPPED])
        result = replace(result, series=series)
    return Timed(result, time.process_time() - began)


def _measure(job: tuple[Measurement, Path]) -> Timed[tuple[str, dict[str, float]]]:
    measurement, traces = job
    began = time.process_time()
    values = {name: float(f"{value:.4g}") for name, value in measurement.measure(traces).items()}
    return Timed((measurement.key, values), time.process_time() - began)


def _searched(
    chosen: Sequence[Study], runs: Runs, jobs: int, advance: Advance
) -> dict[str, dict[tuple[str, int], Goodput]]:
    asked = [
        (study.key, search)
        for study in chosen
        for search in goodput_searches(r for r in runs.results[study.key] if r.cell.variant.called in study.goodput)
    ]
    once: dict[str, tuple[str, GoodputSearch]] = {}
    for key, search in asked:
        if _is_near(search):
            once.setdefault(_search_mark(search), (key, search))
        else:
            advance(SEARCH_RUNS * cost(search.cell))
    found: dict[str, Goodput] = {}
    for timed in run_all(_search_keyed, list(once.values()), jobs):
        key, search, goodput = timed.value
        found[_search_mark(search)] = goodput
        runs.account(key, timed.seconds)
        advance(SEARCH_RUNS * cost(search.cell))
    goodputs: dict[str, dict[tuple[str, int], Goodput]] = {study.key: {} for study in chosen}
    for key, search in asked:
        if _search_mark(search) in found:
            goodputs[key][search_key(search.cell)] = found[_search_mark(search)]
    return goodputs


def _search_mark(search: GoodputSearch) -> str:
    """Searches of one scenario begin with the same points only if their studies have the same rates."""
    return repr((search.cell.source, search.cell.scenario, [point.qps for point in search.known]))


def _is_near(search: GoodputSearch) -> bool:
    return any(point.effective_capacity >= NEAR_SHARE for point in search.known)


def _search_keyed(job: tuple[str, GoodputSearch]) -> Timed[tuple[str, GoodputSearch, Goodput]]:
    began = time.process_time()
    search, goodput = run_search(job[1])
    return Timed((job[0], search, goodput), time.process_time() - began)


# --- The bound ---


def _bound_jobs(study: Study) -> list[BoundJob]:
    rates = tuple(study.rates)
    return [
        BoundJob(study.key, study.source, bound, rates, seed, bool(study.goodput) and bound != BOUND_FCFS)
        for bound in study.bounds
        for seed in study.seeds
    ]


def _run_bound(job: BoundJob) -> Timed[Bound]:
    began = time.process_time()
    bound = _bound(job)
    return Timed(bound, time.process_time() - began)


def _bound(job: BoundJob) -> Bound:
    requests = requests_of(job.source, job.seed)
    arrivals = ARRIVALS[job.source.arrivals]

    def capacity_at(qps: float) -> float:
        timed = arrivals(requests, rate=qps, chance=random.Random(job.seed))
        return max(_capacity(queue, job, timed) for queue in BOUNDS[job.bound])

    capacity = tuple(capacity_at(qps) for qps in job.rates)
    if not job.searched:
        return Bound(job, capacity, None)
    known = [RatePoint(qps, share) for qps, share in zip(job.rates, capacity, strict=True)]
    return Bound(job, capacity, find_goodput(capacity_at, start_qps=job.rates[-1], known=known))


def _capacity(queue: CentralQueue, job: BoundJob, requests: list[WorkloadRequest]) -> float:
    scenario = Scenario(seed=job.seed)
    outcome = central_queue(
        scenario, requests, queue.order, decile_floor=queue.floor, late=queue.late, foresight=queue.foresight
    )
    return effective_capacity(outcome.rows[WARMUP:]) or 0.0


def _with_bounds(numbers: StudyNumbers, bounds: Sequence[Bound]) -> StudyNumbers:
    for name in BOUNDS:
        own = [bound for bound in bounds if bound.job.bound == name]
        if own:
            shares = zip(*(bound.capacity for bound in own), strict=True)
            numbers.bounds[name] = [round(fmean(at_one_rate), 4) for at_one_rate in shares]
            numbers.bound_goodput[name] = [round(bound.goodput.qps, 3) for bound in own if bound.goodput]
    return numbers
