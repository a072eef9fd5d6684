"""Runs the central queues of the studies that compare with them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pointsman.simulation.metrics import effective_capacity, hit_rate
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.scenario import Scenario
from pointsman.simulation.workload import ARRIVALS, WorkloadRequest
from pointsman_cli.simulate.experiment import Source, requests_of
from pointsman_lab.results.central_queue import central_queue
from pointsman_lab.results.numbers import StudyNumbers
from pointsman_lab.results.study import BOUNDS, CentralQueue, Study


@dataclass(frozen=True, slots=True)
class BoundJob:
    study: str
    source: Source
    bound: str
    rates: tuple[float, ...]
    seed: int
    warmup: int


@dataclass(frozen=True, slots=True)
class Bound:
    """By rate: capacity, and the hit rate of those that it served."""

    job: BoundJob
    capacity: tuple[float, ...]
    hit_rate: tuple[float, ...]


def bound_jobs(study: Study) -> list[BoundJob]:
    return [
        BoundJob(study.key, study.source, bound, tuple(study.rates), seed, study.warmup)
        for bound in study.bounds
        for seed in study.seeds
    ]


def run_bound(job: BoundJob) -> Bound:
    requests = requests_of(job.source, job.seed)
    arrivals = ARRIVALS[job.source.arrivals]

    def best_at(qps: float) -> tuple[float, float]:
        timed = arrivals(requests, rate=qps, chance=random.Random(job.seed))
        return max(_capacity_and_hits(_outcome(queue, job, timed), job) for queue in BOUNDS[job.bound])

    capacity, hits = zip(*(best_at(qps) for qps in job.rates), strict=True)
    return Bound(job, capacity, hits)


def _outcome(queue: CentralQueue, job: BoundJob, requests: Sequence[WorkloadRequest]) -> Outcome:
    return central_queue(
        Scenario(seed=job.seed),
        requests,
        queue.order,
        decile_floor=queue.floor,
        late=queue.late,
        foresight=queue.foresight,
    )


def _capacity_and_hits(outcome: Outcome, job: BoundJob) -> tuple[float, float]:
    rows = outcome.rows[job.warmup :]
    return effective_capacity(rows) or 0.0, hit_rate([row for row in rows if row.first_token_at is not None]) or 0.0


def with_bounds(numbers: StudyNumbers, bounds: Sequence[Bound]) -> StudyNumbers:
    for name in BOUNDS:
        own = [bound for bound in bounds if bound.job.bound == name]
        if own:
            numbers.bounds[name] = _means([bound.capacity for bound in own])
            numbers.bound_hits[name] = _means([bound.hit_rate for bound in own])
    return numbers


def _means(by_seed: Sequence[Sequence[float]]) -> list[float]:
    return [round(fmean(at_one_rate), 4) for at_one_rate in zip(*by_seed, strict=True)]
