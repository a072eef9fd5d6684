"""When requests arrive: any workload, given other times.

Three kinds, by what they keep.

- `at_rate`, `faster` stretch time evenly: the pattern stays, the pauses shrink with it.
- `poisson`, `gamma`, `uniform`, `timestamps` deal out new times, one request after another: the order stays, so the
  turns of a session keep theirs, but the pauses between them are gone. `causal` afterwards moves those turns later
  that would ask about an answer nobody could have read yet.
- `diurnal` bends time along the day and moves each session as a whole, so that its pauses stay as they were.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pointsman.primitives import Seconds, SessionId, Tokens
from pointsman.simulation.workload.requests import (
    NO_SESSION,
    TRACE_BLOCK_TOKENS,
    WorkloadRequest,
    in_order,
    mean_rate,
)
from pointsman.simulation.workload.traces import ROUNDING_SECONDS

ANSWER_SECONDS_PER_TOKEN: Seconds = 0.03
"""How fast answers are thought to come, wherever a workload must guess: it is open loop and never sees one."""

GAMMA_CV = 2.0
"""Burstiness of `gamma` where nobody says otherwise; a Poisson process has 1."""


# --- The same pattern ---


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """The same arrivals stretched or squeezed to a mean of `rate` a second. Raises ValueError unless positive."""
    return faster(requests, rate / mean_rate(requests)) if mean_rate(requests) else list(requests)


def faster(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """The same arrivals in `factor` times less time. Raises ValueError unless positive."""
    if not factor > 0:
        msg = f"arrivals can be sped up by a positive factor only, not {factor}"
        raise ValueError(msg)
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


# --- New times, in the same order ---


def poisson(requests: Sequence[WorkloadRequest], *, rate: float, chance: random.Random) -> list[WorkloadRequest]:
    """Independent arrivals, `rate` a second on average. Raises ValueError unless positive."""
    _check_rate(rate)
    return _spaced(requests, lambda: chance.expovariate(rate))


def gamma(
    requests: Sequence[WorkloadRequest], *, rate: float, cv: float = GAMMA_CV, chance: random.Random
) -> list[WorkloadRequest]:
    """Arrivals whose gaps have the coefficient of variation `cv`: above 1 burstier than Poisson, below 1 calmer.

    Raises ValueError unless `rate` and `cv` are positive.
    """
    _check_rate(rate)
    if not cv > 0:
        msg = f"the variation of gaps must be positive, not {cv}"
        raise ValueError(msg)
    shape = 1 / cv**2
    return _spaced(requests, lambda: chance.gammavariate(shape, 1 / (shape * rate)))


def uniform(requests: Sequence[WorkloadRequest], *, rate: float) -> list[WorkloadRequest]:
    """Arrivals at equal distances, `rate` a second. Raises ValueError unless positive."""
    _check_rate(rate)
    return _at(requests, (number / rate for number in range(len(requests))))


def timestamps(
    requests: Sequence[WorkloadRequest],
    *,
    moments: Iterable[Seconds],
    chance: random.Random,
    spread_s: Seconds = ROUNDING_SECONDS,
) -> list[WorkloadRequest]:
    """The arrivals of another workload, often a trace, each spread over the `spread_s` that it rounded away.

    Moments beyond the last request are not used. Raises ValueError when there are fewer moments than requests.
    """
    chosen = sorted(moments)[: len(requests)]
    if len(chosen) < len(requests):
        msg = f"{len(chosen)} moments are too few for {len(requests)} requests"
        raise ValueError(msg)
    return in_order(_at(requests, sorted(moment + chance.uniform(0.0, spread_s) for moment in chosen)))


class Arrivals(Protocol):
    """Gives requests new times, about `rate` a second, from nothing but `chance`."""

    def __call__(
        self, requests: Sequence[WorkloadRequest], *, rate: float, chance: random.Random
    ) -> list[WorkloadRequest]: ...


def _rescaled(
    requests: Sequence[WorkloadRequest],
    *,
    rate: float,
    chance: random.Random,  # noqa: ARG001 -- one signature for all of ARRIVALS
) -> list[WorkloadRequest]:
    return at_rate(requests, rate)


def _evenly(
    requests: Sequence[WorkloadRequest],
    *,
    rate: float,
    chance: random.Random,  # noqa: ARG001 -- one signature for all of ARRIVALS
) -> list[WorkloadRequest]:
    return uniform(requests, rate=rate)


ARRIVALS: dict[str, Arrivals] = {"timestamps": _rescaled, "poisson": poisson, "gamma": gamma, "uniform": _evenly}
"""By name; `timestamps` keeps the workload's own pattern and scales it to the rate."""


def _check_rate(rate: float) -> None:
    if not rate > 0:
        msg = f"a rate must be positive, not {rate}"
        raise ValueError(msg)


def _spaced(requests: Sequence[WorkloadRequest], gap: Callable[[], Seconds]) -> list[WorkloadRequest]:
    moment = 0.0
    moments = []
    for _ in requests:
        moments.append(moment)
        moment += gap()
    return _at(requests, moments)


def _at(requests: Sequence[WorkloadRequest], moments: Iterable[Seconds]) -> list[WorkloadRequest]:
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    return [replace(request, arrival_s=moment) for request, moment in zip(ordered, moments, strict=True)]


# --- Causality ---


def answered_s(request: WorkloadRequest, seconds_per_token: Seconds = ANSWER_SECONDS_PER_TOKEN) -> Seconds:
    """When, by a guess that knows no queues, the whole answer is there."""
    return request.arrival_s + request.output_tokens * seconds_per_token


def causal(
    requests: Sequence[WorkloadRequest], *, seconds_per_token: Seconds = ANSWER_SECONDS_PER_TOKEN
) -> list[WorkloadRequest]:
    """The same requests, none before the answers that it continues; those that were too early come as they end.

    A request continues an earlier one of its session when it begins with all its whole blocks and has room for the
    answer behind them. The rate can only fall.
    """
    earlier: dict[SessionId, list[WorkloadRequest]] = {}
    moved = []
    for request in sorted(requests, key=lambda request: request.arrival_s):
        before = earlier.setdefault(request.session, []) if request.session != NO_SESSION else []
        ends = (answered_s(turn, seconds_per_token) for turn in before if _continues(request, turn))
        later = replace(request, arrival_s=max(request.arrival_s, max(ends, default=0.0)))
        before.append(later)
        moved.append(later)
    return in_order(moved)


def _continues(request: WorkloadRequest, before: WorkloadRequest) -> bool:
    whole: Tokens = before.input_length // TRACE_BLOCK_TOKENS
    return (
        before.input_length + before.output_tokens <= request.input_length
        and request.block_ids[:whole] == before.block_ids[:whole]
    )


# --- The day ---


@dataclass(frozen=True, slots=True, kw_only=True)
class DayShape:
    """A day that begins at its quietest, is busiest in the middle, and follows a sine between: the slow wave of
    published production traces, without their noise."""

    day_s: Seconds = 600.0
    """Length of the compressed day; longer workloads see several, shorter ones a part."""
    swing: float = 0.7
    """The rate goes from `1 - swing` to `1 + swing` times its mean. From 0 to below 1."""

    def __post_init__(self) -> None:
        if not (self.day_s > 0 and 0 <= self.swing < 1):
            msg = f"a day needs a length and a swing from 0 to below 1, not {self}"
            raise ValueError(msg)


DEFAULT_DAY = DayShape()


def diurnal(requests: Sequence[WorkloadRequest], *, shape: DayShape = DEFAULT_DAY) -> list[WorkloadRequest]:
    """The same requests with a rate that follows the day; over whole days their mean rate stays.

    Sessions begin by the day and keep their own pace from there on.
    """
    shifts: dict[SessionId, Seconds] = {}
    moved = []
    for request in sorted(requests, key=lambda request: request.arrival_s):
        shift = shifts.get(request.session)
        if shift is None:
            shift = _moment_of_day(request.arrival_s, shape) - request.arrival_s
            if request.session != NO_SESSION:
                shifts[request.session] = shift
        moved.append(replace(request, arrival_s=request.arrival_s + shift))
    return in_order(moved)


def _moment_of_day(steady_s: Seconds, shape: DayShape) -> Seconds:
    """When the day's curve has brought as many arrivals as a steady rate brings until `steady_s`, by bisection."""
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
