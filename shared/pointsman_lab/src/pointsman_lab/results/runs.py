"""Runs every simulation of the chosen studies on all cores, the longest first, with one progress bar. Shared runs are
made once; goodput searches start from the sweeps. A study that raises is left out, and the others go on."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console

from pointsman.simulation.goodput import Goodput
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.simulate.experiment import (
    Cell,
    CellResult,
    GoodputSearch,
    goodput_searches,
    run_all,
    run_cell,
    run_search,
    search_key,
)
from pointsman_lab.results.bounds import Bound, BoundJob, bound_jobs, run_bound, with_bounds
from pointsman_lab.results.numbers import Numbers, study_numbers
from pointsman_lab.results.study import BOUNDS, Measurement, Study

SEARCH_RUNS = 3.5
BOUND_RUNS = 0.7
"""Of a run, for each order of a bound."""
MEASUREMENT_COST = 100_000.0
"""Of the longest one."""
NEAR_SHARE = 0.7
SAMPLES_SKIPPED = 10

J = TypeVar("J")
V = TypeVar("V")

Keep = Callable[[Numbers], None]


@dataclass(slots=True)
class Runs:
    """`seconds`: CPU seconds of each study and measurement; runs that several studies share count for the first.
    `failed`: what studies and measurements raised."""

    results: dict[str, list[CellResult]] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=lambda: Numbers(taste=False, studies={}))
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

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
    keep: Keep = lambda _: None,
) -> Runs:
    """`keep` gets the numbers after each stage, so that an end before the last one loses little."""
    runs = _Running(chosen, measurements, jobs)
    runs.runs.numbers.taste = taste
    with progress_bar(console, runs.total, f"{len(runs.once)} runs of {len(chosen)} studies", counts=False) as update:
        runs.update = lambda: update(runs.completed, "")
        for stage in (runs.sweep, runs.search, partial(runs.bound_and_measure, traces)):
            stage()
            runs.runs.numbers.core_minutes = round(sum(runs.runs.seconds.values()) / 60)
            keep(runs.runs.numbers)
    return runs.runs


class _Running:
    def __init__(self, chosen: Sequence[Study], measurements: Sequence[Measurement], jobs: int) -> None:
        self.runs = Runs()
        self.once: dict[str, Cell] = {}
        self._chosen = chosen
        self._measurements = measurements
        self._jobs = jobs
        self._needed_by: dict[str, list[str]] = {}
        for study in chosen:
            for cell in study.cells():
                self.once.setdefault(_mark(cell), cell)
                self._needed_by.setdefault(_mark(cell), []).append(study.key)
        self._bounds = [job for study in chosen for job in bound_jobs(study)]
        self.completed = 0.0
        self.update: Callable[[], None] = lambda: None
        searched = [
            cell for study in chosen for cell in study.cells() if study.is_searched(cell) and cell.qps == study.rates[0]
        ]
        self.total = (
            sum(map(cost, self.once.values()))
            + sum(SEARCH_RUNS * cost(cell) for cell in searched)
            + sum(map(_bound_cost, self._bounds))
            + MEASUREMENT_COST * len(measurements)
        )

    def _advance(self, done: float) -> None:
        self.completed += done
        self.update()

    def _standing(self) -> list[Study]:
        return [study for study in self._chosen if study.key not in self.runs.failed]

    def _each(
        self, function: Callable[[J], V], jobs: Sequence[J], keys: Callable[[J], list[str]], price: Callable[[J], float]
    ) -> "Iterator[tuple[J, V]]":
        """The results of the jobs that raised nothing. `keys`: the studies that need a job. A long job that begins last
        would leave the other cores idle."""
        jobs = sorted(jobs, key=price, reverse=True)
        for tried in run_all(partial(_tried, function), list(enumerate(jobs)), self._jobs):
            job = jobs[tried.number]
            needed_by = keys(job)
            self.runs.account(needed_by[0], tried.seconds)
            self._advance(price(job))
            if tried.value is None:
                self.runs.failed.update(dict.fromkeys(needed_by, tried.error))
            else:
                yield job, tried.value

    def sweep(self) -> None:
        in_full = {_mark(cell) for study in self._chosen if study.windows for cell in study.cells()}
        asked = [(mark, cell, mark in in_full) for mark, cell in self.once.items()]
        made = self._each(_run, asked, lambda job: self._needed_by[job[0]], lambda job: cost(job[1]))
        by_mark = {mark: result for (mark, _, _), result in made}
        for study in self._standing():
            # Where the run was made for another study, its row may have another name.
            results = [replace(by_mark[_mark(cell)], cell=cell) for cell in study.cells()]
            self.runs.results[study.key] = results
            self.runs.numbers.studies[study.key] = study_numbers(study, results, {})

    def search(self) -> None:
        asked: list[tuple[Study, GoodputSearch]] = [
            (study, search)
            for study in self._standing()
            for search in goodput_searches(
                result for result in self.runs.results[study.key] if study.is_searched(result.cell)
            )
        ]
        once: dict[str, GoodputSearch] = {}
        needed_by: dict[str, list[str]] = {}
        for study, search in asked:
            if any(point.effective_capacity >= NEAR_SHARE for point in search.known):
                once.setdefault(_search_mark(search), search)
                needed_by.setdefault(_search_mark(search), []).append(study.key)
            else:
                self._advance(SEARCH_RUNS * cost(search.cell))
        found: dict[str, Goodput] = {}
        for (mark, _), (_, goodput) in self._each(
            _search, list(once.items()), lambda job: needed_by[job[0]], lambda job: SEARCH_RUNS * cost(job[1].cell)
        ):
            found[mark] = goodput
        for study in {study.key: study for study, _ in asked}.values():
            own = {
                search_key(search.cell): found[_search_mark(search)]
                for other, search in asked
                if other.key == study.key and _search_mark(search) in found
            }
            results = self.runs.results[study.key]
            self.runs.numbers.studies[study.key] = study_numbers(study, results, own)
        self._drop_failed()

    def bound_and_measure(self, traces: Path) -> None:
        standing = {study.key for study in self._standing()}
        bounds: dict[str, list[Bound]] = {}
        measured: dict[str, dict[str, float]] = {}
        jobs: list[BoundJob | Measurement] = [job for job in self._bounds if job.study in standing]
        jobs += self._measurements
        for job, found in self._each(partial(_bound_or_measure, traces), jobs, _keys, _price):
            if isinstance(found, Bound):
                bounds.setdefault(found.job.study, []).append(found)
            else:
                measured[_keys(job)[0]] = found
        for key, own in bounds.items():
            with_bounds(self.runs.numbers.studies[key], sorted(own, key=lambda bound: bound.job.seed))
        self.runs.numbers.measurements = {
            one.key: measured[one.key] for one in self._measurements if one.key in measured
        }
        self._drop_failed()

    def _drop_failed(self) -> None:
        for key in self.runs.failed:
            self.runs.numbers.studies.pop(key, None)


def cost(cell: Cell) -> float:
    scenario = cell.scenario
    folds_twice = 1.7 if scenario.load_lag_s else 1.0
    decodes = 1.0 if scenario.prefill_only else 1.5
    return cell.source.requests * (0.8 + scenario.instances / 40) * folds_twice * decodes


def _mark(cell: Cell) -> str:
    return repr((cell.source, cell.scenario, cell.qps, cell.warmup))


def _bound_cost(job: BoundJob) -> float:
    return BOUND_RUNS * job.source.requests * len(BOUNDS[job.bound]) * len(job.rates)


@dataclass(frozen=True, slots=True)
class Tried(Generic[V]):
    """`value`: None if the job raised `error`."""

    number: int
    value: V | None
    seconds: float
    error: str = ""


def _tried(function: Callable[[J], V], numbered: tuple[int, J]) -> Tried[V]:
    number, job = numbered
    began = time.process_time()
    try:
        value = function(job)
    except Exception as error:  # noqa: BLE001 - one broken study must not lose the numbers of the others
        return Tried(number, None, time.process_time() - began, f"{type(error).__name__}: {error}")
    return Tried(number, value, time.process_time() - began)


def _run(job: tuple[str, Cell, bool]) -> CellResult:
    _, cell, in_full = job
    result = run_cell(cell)
    if in_full:
        return result
    series = replace(result.series, arrivals=(), samples=result.series.samples[::SAMPLES_SKIPPED])
    return replace(result, series=series)


def _search(job: tuple[str, GoodputSearch]) -> tuple[GoodputSearch, Goodput]:
    return run_search(job[1])


def _bound_or_measure(traces: Path, job: BoundJob | Measurement) -> Bound | dict[str, float]:
    if isinstance(job, BoundJob):
        return run_bound(job)
    return {name: float(f"{value:.4g}") for name, value in job.measure(traces).items()}


def _keys(job: BoundJob | Measurement) -> list[str]:
    return [job.study if isinstance(job, BoundJob) else job.key]


def _price(job: BoundJob | Measurement) -> float:
    return _bound_cost(job) if isinstance(job, BoundJob) else MEASUREMENT_COST


def _search_mark(search: GoodputSearch) -> str:
    """Searches of one scenario begin with the same points only if their studies have the same rates."""
    return repr((search.cell.source, search.cell.scenario, [point.qps for point in search.known]))
