"""Goodput: the highest request rate at which effective request capacity meets a target. Brackets the rate, then
bisects, beginning with the points of a sweep. Of several crossings (noise) the first counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TARGET = 0.9
RUNS_MAX = 16
TOLERANCE = 0.01

STRIDE = 1.5
"""Factor between rates until the target is bracketed."""


@dataclass(frozen=True, slots=True)
class RatePoint:
    qps: float
    effective_capacity: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """`qps`: 0 if no rate met the target. `points`: all runs, by rate. `at_least`: no rate missed the target."""

    qps: float
    points: tuple[RatePoint, ...]
    at_least: bool = False


def find_goodput(
    capacity_at: Callable[[float], float],
    *,
    start_qps: float,
    known: Sequence[RatePoint] = (),
) -> Goodput:
    """Starts at `start_qps` unless there are `known` points. Raises ValueError."""
    if not start_qps > 0:
        raise ValueError(f"the search must begin at a positive rate, not {start_qps}")
    points = list(known)
    for _ in range(RUNS_MAX):
        met, missed = _bracket(points)
        rate = _next_rate(met, missed, start_qps)
        if rate is None:
            break
        points.append(RatePoint(rate, capacity_at(rate)))
    met, missed = _bracket(points)
    ordered = tuple(sorted(points, key=lambda point: point.qps))
    return Goodput(qps=met or 0.0, points=ordered, at_least=met is not None and missed is None)


def _bracket(points: Sequence[RatePoint]) -> tuple[float | None, float | None]:
    """The lowest rate that misses the target, and below it the highest that meets it."""
    missed = min((p.qps for p in points if p.effective_capacity < TARGET), default=None)
    below = math.inf if missed is None else missed
    met = max((p.qps for p in points if p.effective_capacity >= TARGET and p.qps < below), default=None)
    return met, missed


def _next_rate(met: float | None, missed: float | None, start_qps: float) -> float | None:
    if met is None and missed is None:
        return start_qps
    if missed is None:
        assert met is not None
        return met * STRIDE
    if met is None:
        return missed / STRIDE
    return math.sqrt(met * missed) if missed > met * (1 + TOLERANCE) else None
