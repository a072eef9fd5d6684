"""Fits Mooncake's prefill cost polynomial by non-negative least squares of relative errors, with an optional floor."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy as np

from pointsman.adapters.calibration_file import Measurement
from pointsman.contracts.fleet import PrefillCost

FLOOR_GAIN_MIN = 0.1
"""Share of the squared error that a floor must remove."""
EXACT = 1e-8
TINY = np.finfo(float).tiny
DEPENDENT = 1e-6
"""Ratio of singular values below which the measurements do not tell two coefficients apart."""


def fitted(points: Sequence[Measurement]) -> PrefillCost:
    """Raises ValueError with fewer than three points."""
    if len(points) < 3:
        raise ValueError(f"{len(points)} measurements are too few to fit three coefficients")
    best = _polynomial(points)
    plain_error = lowest = _squared_error(best, points)
    if plain_error < EXACT * len(points):
        return best
    by_work = sorted(points, key=lambda point: point.total - point.cached)
    for few in range(1, len(by_work) - 2):
        cost = _with_floor(by_work[:few], by_work[few:])
        error = _squared_error(cost, points)
        if error < lowest and error < (1 - FLOOR_GAIN_MIN) * plain_error:
            best, lowest = cost, error
    return best


def relative_error(cost: PrefillCost, points: Sequence[Measurement]) -> float:
    return median(abs(_residual(cost, point)) for point in points)


def _polynomial(points: Sequence[Measurement]) -> PrefillCost:
    rows = [_row(point) for point in points]
    fixed, linear, squared = _nonnegative_least_squares(rows)
    return PrefillCost(fixed_s=fixed, per_token_s=linear, per_token_squared_s=squared)


def _with_floor(few: Sequence[Measurement], many: Sequence[Measurement]) -> PrefillCost:
    cost = _polynomial(many)
    weights = [1 / point.seconds for point in few]
    constant = sum(weights) / sum(weight * weight for weight in weights)
    return PrefillCost(
        fixed_s=cost.fixed_s,
        per_token_s=cost.per_token_s,
        per_token_squared_s=cost.per_token_squared_s,
        floor_s=max(0.0, constant - cost.fixed_s),
    )


def _residual(cost: PrefillCost, point: Measurement) -> float:
    return cost.seconds(point.total, point.cached) / point.seconds - 1


def _squared_error(cost: PrefillCost, points: Sequence[Measurement]) -> float:
    return sum(_residual(cost, point) ** 2 for point in points)


def _row(point: Measurement) -> tuple[float, float, float]:
    total, cached = point.total, point.cached
    return 1 / point.seconds, (total - cached) / point.seconds, (total * total - cached * cached) / point.seconds


def _nonnegative_least_squares(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    best, lowest = (0.0, 0.0, 0.0), float(len(rows))
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solution = _least_squares(rows, chosen)
            if solution is None or min(solution) < 0:
                continue
            whole = [0.0, 0.0, 0.0]
            for place, value in zip(chosen, solution, strict=True):
                whole[place] = value
            error = sum((sum(a * b for a, b in zip(row, whole, strict=True)) - 1) ** 2 for row in rows)
            if error < lowest:
                best, lowest = (whole[0], whole[1], whole[2]), error
    return best


def _least_squares(rows: Sequence[tuple[float, float, float]], chosen: Sequence[int]) -> list[float] | None:
    columns = np.array(rows)[:, list(chosen)]
    scale = np.maximum(np.abs(columns).max(axis=0), TINY)
    solution, _, rank, _ = np.linalg.lstsq(columns / scale, np.ones(len(rows)), rcond=DEPENDENT)
    return [float(value) for value in solution / scale] if rank == len(chosen) else None
