"""New arrival times for any workload. `at_rate`, `faster` stretch time evenly; `poisson`, `gamma`, `uniform` keep only
the order; `diurnal` and `in_steps` follow a day and move each session as a whole."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pointsman.primitives import EngineSeconds, SessionId, plain_sum
from pointsman.simulation.workload.requests import (
    NO_SESSION,
    WorkloadRequest,
    in_order,
    mean_rate,
)

ANSWER_SECONDS_PER_TOKEN: EngineSeconds = 0.03
"""Guessed: workloads are open loop."""

GAMMA_CV = 2.0


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Stretched to a mean of `rate` a second. Raises ValueError unless positive."""
    return faster(requests, rate / mean_rate(requests)) if mean_rate(requests) else list(requests)


def faster(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    if not factor > 0:
        raise ValueError(f"arrivals can be sped up by a positive factor only, not {factor}")
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def poisson(requests: Sequence[WorkloadRequest], *, rate: float, chance: random.Random) -> list[WorkloadRequest]:
    """Raises ValueError unless `rate` is positive."""
    _check_rate(rate)
    return _spaced(requests, lambda: chance.expovariate(rate))


def gamma(
    requests: Sequence[WorkloadRequest], *, rate: float, cv: float = GAMMA_CV, chance: random.Random
) -> list[WorkloadRequest]:
    """`cv`: coefficient of variation of the gaps; 1: Poisson. Raises ValueError unless `rate` and `cv` are positive."""
    _check_rate(rate)
    if not cv > 0:
        raise ValueError(f"the variation of gaps must be positive, not {cv}")
    shape = 1 / cv**2
    return _spaced(requests, lambda: chance.gammavariate(shape, 1 / (shape * rate)))


def uniform(requests: Sequence[WorkloadRequest], *, rate: float) -> list[WorkloadRequest]:
    """Equal gaps. Raises ValueError unless `rate` is positive."""
    _check_rate(rate)
    return _at(requests, (number / rate for number in range(len(requests))))


class Arrivals(Protocol):
    """New times, about `rate` a second, from nothing but `chance`."""

    def __call__(
        self, requests: Sequence[WorkloadRequest], *, rate: float, chance: random.Random
    ) -> list[WorkloadRequest]: ...


ARRIVALS: dict[str, Arrivals] = {
    "timestamps": lambda requests, *, rate, chance: at_rate(requests, rate),  # noqa: ARG005
    "poisson": poisson,
    "gamma": gamma,
    "uniform": lambda requests, *, rate, chance: uniform(requests, rate=rate),  # noqa: ARG005
}


def _check_rate(rate: float) -> None:
    if not rate > 0:
        raise ValueError(f"a rate must be positive, not {rate}")


def _spaced(requests: Sequence[WorkloadRequest], gap: Callable[[], EngineSeconds]) -> list[WorkloadRequest]:
    moment = 0.0
    moments = []
    for _ in requests:
        moments.append(moment)
        moment += gap()
    return _at(requests, moments)


def _at(requests: Sequence[WorkloadRequest], moments: Iterable[EngineSeconds]) -> list[WorkloadRequest]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [replace(request, arrival_s=moment) for request, moment in zip(ordered, moments, strict=True)]


def answered_s(request: WorkloadRequest) -> EngineSeconds:
    return request.arrival_s + request.output_tokens * ANSWER_SECONDS_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class DayShape:
    """A sine, quietest at the start and busiest in the middle."""

    day_s: EngineSeconds = 600.0
    swing: float = 0.7
    """The rate goes from `1 - swing` to `1 + swing` times its mean; 0 to below 1."""

    def __post_init__(self) -> None:
        if not (self.day_s > 0 and 0 <= self.swing < 1):
            raise ValueError(f"a day needs a length and a swing from 0 to below 1, not {self}")


DEFAULT_DAY = DayShape()


def diurnal(requests: Sequence[WorkloadRequest], *, shape: DayShape = DEFAULT_DAY) -> list[WorkloadRequest]:
    """The rate follows the day, with the same mean over whole days. Sessions keep their pace."""
    return _sessions_moved(requests, lambda steady_s: _moment_of_day(steady_s, shape))


def in_steps(requests: Sequence[WorkloadRequest], *, parts: Sequence[tuple[float, float]]) -> list[WorkloadRequest]:
    """The time of all `requests` is one day with the same mean rate. Each part has a share of its length and a rate, in
    any unit, both positive. Sessions keep their pace."""
    day_s = max((request.arrival_s for request in requests), default=0.0)
    length, arrivals = plain_sum(share for share, _ in parts), plain_sum(share * rate for share, rate in parts)

    def moment(steady_s: EngineSeconds) -> EngineSeconds:
        left, moment_s = steady_s * arrivals / day_s if day_s else 0.0, 0.0
        for share, rate in parts:
            taken = min(left, share * rate)
            left, moment_s = left - taken, moment_s + taken / rate
        return moment_s / length * day_s

    return _sessions_moved(requests, moment)


def _sessions_moved(
    requests: Sequence[WorkloadRequest], moment: Callable[[EngineSeconds], EngineSeconds]
) -> list[WorkloadRequest]:
    """Each session begins at the `moment` of its steady beginning."""
    shifts: dict[SessionId, EngineSeconds] = {}
    moved = []
    for request in sorted(requests, key=lambda request: request.arrival_s):
        shift = shifts.get(request.session)
        if shift is None:
            shift = moment(request.arrival_s) - request.arrival_s
            if request.session != NO_SESSION:
                shifts[request.session] = shift
        moved.append(replace(request, arrival_s=request.arrival_s + shift))
    return in_order(moved)


def _moment_of_day(steady_s: EngineSeconds, shape: DayShape) -> EngineSeconds:
    """When the day's curve has brought as many arrivals as a steady rate until `steady_s`, by bisection."""
    turn = 2 * math.pi / shape.day_s
    reach = shape.swing / turn
    low, high = steady_s - reach, steady_s + reach
    while high - low > 1e-9 * (1.0 + abs(high)):
        middle = (low + high) / 2
        if middle - reach * math.sin(turn * middle) < steady_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2
