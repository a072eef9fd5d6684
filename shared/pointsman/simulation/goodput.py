"""Goodput: the highest request rate at which effective request capacity stays at or above a target.

Only the search; what a run at a rate costs and means is the caller's. It brackets the rate by doubling or halving,
then bisects, and takes as known whatever a sweep has already measured. Capacity falls with the rate but for noise;
where it crosses the target more than once, the first crossing counts, because beyond it capacity did not *stay*.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TARGET = 0.9
RUNS_MAX = 16
TOLERANCE = 0.01
"""The search ends when it knows the rate to within this share."""

STRIDE = 1.5
"""Factor between the rates that are tried until one meets the target and one misses it."""


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One run: requests a second, and the share of them that was on time."""

    qps: float
    effective_capacity: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """`qps` is the highest rate found to meet the target, 0 where none did; `points` all that is known, by rate.

    `at_least`: the search ran out of runs before any rate missed the target, so the truth lies higher.
    """

    qps: float
    points: tuple[RatePoint, ...]
    at_least: bool = False


def find_goodput(
    capacity_at: Callable[[float], float],
    *,
    start_qps: float,
    known: Sequence[RatePoint] = (),
    target: float = TARGET,
    tolerance: float = TOLERANCE,
    runs_max: int = RUNS_MAX,
) -> Goodput:
    """Search with at most `runs_max` calls of `capacity_at`, beginning at `start_qps` unless `known` says where.

    Raises ValueError unless `start_qps` is positive.
    """
    if not start_qps > 0:
        msg = f"the search must begin at a positive rate, not {start_qps}"
        raise ValueError(msg)
    points = list(known)
    for _ in range(runs_max):
        met, missed = _bracket(points, target)
        rate = _next_rate(met, missed, start_qps, tolerance)
        if rate is None:
            break
        points.append(RatePoint(rate, capacity_at(rate)))
    met, missed = _bracket(points, target)
    ordered = tuple(sorted(points, key=lambda point: point.qps))
    return Goodput(qps=met or 0.0, points=ordered, at_least=met is not None and missed is None)


def _bracket(points: Sequence[RatePoint], target: float) -> tuple[float | None, float | None]:
    """The lowest rate that misses the target, and below it the highest that meets it."""
    missed = min((p.qps for p in points if p.effective_capacity < target), default=None)
    below = math.inf if missed is None else missed
    met = max((p.qps for p in points if p.effective_capacity >= target and p.qps < below), default=None)
    return met, missed


def _next_rate(met: float | None, missed: float | None, start_qps: float, tolerance: float) -> float | None:
    """Where to look next; None when the bracket is tight enough."""
    if met is None and missed is None:
        return start_qps
    if missed is None:
        assert met is not None
        return met * STRIDE
    if met is None:
        return missed / STRIDE
    return math.sqrt(met * missed) if missed > met * (1 + tolerance) else None
