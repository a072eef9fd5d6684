"""One cell of an experiment (a variant at a rate with a seed) as a plain value, and its execution on all cores."""

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation import workload
from pointsman.simulation.goodput import Goodput, RatePoint, find_goodput
from pointsman.simulation.metrics import Report, effective_capacity, summarise
from pointsman.simulation.outcome import LoadSample, Outcome
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import ARRIVALS, LONGER_PREFIXES, MORE_REQUESTS, WorkloadRequest
from pointsman_cli.simulate.variants import Variant
from pointsman_cli.workload_options import workload_requests

J = TypeVar("J")
R = TypeVar("R")
MISBEHAVING = {"_s1": MORE_REQUESTS, "_s2": LONGER_PREFIXES}
SAMPLES_KEPT_MAX = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    trace: Path | None
    generator: str
    requests: int
    input_tokens_max: Tokens
    arrivals: str = "timestamps"
    """How they are re-timed to a rate; see `workload.ARRIVALS`."""
    halved_after: float | None = None

    @property
    def name(self) -> str:
        return self.trace.stem if self.trace else self.generator

    @property
    def misbehaving(self) -> frozenset[str]:
        for suffix, clients in MISBEHAVING.items():
            if self.trace is None and self.generator.endswith(suffix):
                return frozenset(clients.tenants()[: clients.misbehaving])
        return frozenset()

    @property
    def is_reconstruction(self) -> bool:
        return self.trace is not None and "reconstructed" in self.trace.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`warmup` requests are not counted."""

    source: Source
    variant: Variant
    scenario: Scenario
    qps: float
    warmup: int


@dataclass(frozen=True, slots=True)
class Arrival:
    at: EngineSeconds
    ttft: EngineSeconds | None
    on_time: bool


@dataclass(frozen=True, slots=True)
class Series:
    arrivals: tuple[Arrival, ...]
    samples: tuple[LoadSample, ...]
    instance_changes: tuple[tuple[EngineSeconds, int], ...]


@dataclass(frozen=True, slots=True)
class CellResult:
    cell: Cell
    report: Report
    series: Series


@lru_cache(maxsize=4)
def requests_of(source: Source, seed: int) -> tuple[WorkloadRequest, ...]:
    """The requests at their own rate; equal seeds give equal ones. Raises click.ClickException."""
    limits = {"requests": source.requests, "input_tokens_max": source.input_tokens_max}
    return tuple(workload_requests(source.trace, source.generator, seed=seed, **limits))


def run_cell(cell: Cell) -> CellResult:
    """Deterministic except for the measured decision time."""
    requests = _at_rate(cell, cell.qps)
    outcome = simulate(cell.scenario, requests)
    report = summarise(
        outcome,
        warmup=cell.warmup,
        hit_bound=_hit_bound(requests, outcome, cell.warmup),
        misbehaving=cell.source.misbehaving,
    )
    return CellResult(cell, report, series_of(outcome, cell.warmup))


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    cell: Cell
    known: tuple[RatePoint, ...] = ()


def search_key(cell: Cell) -> tuple[str, int]:
    return cell.variant.key, cell.scenario.seed


def goodput_searches(results: Iterable[CellResult]) -> list[GoodputSearch]:
    found: dict[tuple[str, int], GoodputSearch] = {}
    for result in results:
        key = search_key(result.cell)
        search = found.get(key, GoodputSearch(result.cell))
        if result.report.effective_capacity is not None:
            point = RatePoint(result.cell.qps, result.report.effective_capacity)
            search = replace(search, known=(*search.known, point))
        found[key] = search
    return list(found.values())


def run_search(search: GoodputSearch) -> tuple[GoodputSearch, Goodput]:
    cell = search.cell

    def capacity_at(qps: float) -> float:
        outcome = simulate(cell.scenario, _at_rate(cell, qps))
        return effective_capacity(outcome.rows[cell.warmup :]) or 0.0

    return search, find_goodput(capacity_at, start_qps=cell.qps, known=search.known)


def run_all(function: Callable[[J], R], jobs: Sequence[J], processes: int) -> Iterator[R]:
    """Yields results as they complete, from up to `processes` processes (1: this one). Raises the errors of `function`,
    and BrokenProcessPool when a process dies. Leaving the iteration early starts no further runs."""
    if min(processes, len(jobs)) <= 1:
        yield from map(function, jobs)
        return
    # Spawned, not forked: the progress bar has a thread.
    context, dying = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(min(processes, len(jobs)), context, initializer=signal.signal, initargs=dying) as pool:
        try:
            for future in as_completed([pool.submit(function, job) for job in jobs]):
                yield future.result()
        except BaseException:  # also a reader that leaves; else `with` waits, as the exit may fail with a traceback
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _at_rate(cell: Cell, qps: float) -> list[WorkloadRequest]:
    requests = requests_of(cell.source, cell.scenario.seed)
    timed = ARRIVALS[cell.source.arrivals](requests, rate=qps, chance=random.Random(cell.scenario.seed))
    share = cell.source.halved_after
    return timed if share is None else _slower_after(timed, int(share * len(timed)))


def _slower_after(requests: Sequence[WorkloadRequest], number: int) -> list[WorkloadRequest]:
    turn = requests[number].arrival_s
    return [replace(r, arrival_s=r.arrival_s + max(0.0, r.arrival_s - turn)) for r in requests]


def _hit_bound(requests: Sequence[WorkloadRequest], outcome: Outcome, warmup: int) -> float:
    """Over served requests only: a policy that rejects uncached requests must not exceed the bound."""
    served = [row.number for row in outcome.rows if row.first_token_at is not None]
    not_counted = sum(number < warmup for number in served)
    return workload.infinite_cache_hit_share([requests[number] for number in served], warmup=not_counted)


def series_of(outcome: Outcome, warmup: int) -> Series:
    stride = -(-len(outcome.samples) // SAMPLES_KEPT_MAX) or 1
    return Series(
        arrivals=tuple(Arrival(row.arrived_at, row.ttft, row.on_time) for row in outcome.rows[warmup:]),
        samples=tuple(outcome.samples[::stride]),
        instance_changes=tuple(outcome.instance_changes),
    )
