"""Calibrated upper values of predicted TTFT: COVERAGE of the first tokens come within them. `upper = predicted * e^q`,
where q is a quantile of log(actual / predicted) since the placement, learned online by gradient steps on the pinball
loss, for overlapping groups as in Bastani et al. 2022: a first token beyond the upper value that it would be told now
widens q, one within it narrows q. q is a sum over the groups of a request: all, its predicted seconds, whether it waits
behind others, and its instance. A new instance starts wide. Which quantile follows what was told: while more than
1 - COVERAGE of the first tokens come beyond it, as where queues grow, a higher one (adaptive conformal inference, Gibbs
and Candes 2021).

Only requests with a first token count: those that are refused or give up are not known."""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import exp

from pointsman.primitives import EngineSeconds, InstanceId

COVERAGE = 0.9
STEP, STEP_AS_TOLD = 0.02, 0.05
BEYOND_MAX, BEYOND_MIN, BEYOND_STEP = 1 - COVERAGE, 0.01, 0.001
"""Share of the first tokens that q leaves beyond it."""
FIRST, FIRST_OF_INSTANCE = 0.3, 0.3
WIDTH_MAX = 3.0
WAITS_TIMES = 1.5
"""It waits if its predicted TTFT is so many times its own prefill."""
SECONDS_EDGES: tuple[EngineSeconds, ...] = (0.1, 0.4, 1.6, 6.4)
COVERAGE_FADE = 0.998
"""Per first token: about the last 500."""


@dataclass(slots=True)
class TtftIntervals:
    all: float = FIRST
    by_seconds: list[float] = field(default_factory=lambda: [0.0] * (len(SECONDS_EDGES) + 1))
    by_waiting: list[float] = field(default_factory=lambda: [0.0] * 2)
    by_instance: dict[InstanceId, float] = field(default_factory=dict)
    beyond: float = BEYOND_MAX
    within: float = 0.0
    counted: float = 0.0

    @property
    def coverage(self) -> float | None:
        return self.within / self.counted if self.counted else None

    def factor(self, instance: InstanceId, predicted: EngineSeconds, work: EngineSeconds) -> float:
        """Upper value over the predicted one, at least 1. `work`: of its own prefill."""
        return _factor(self._quantile(instance, predicted, work))

    def learn(
        self,
        instance: InstanceId,
        *,
        predicted: EngineSeconds,
        upper: EngineSeconds,
        actual: EngineSeconds,
        work: EngineSeconds,
        as_told: bool = False,
    ) -> None:
        """`upper`: as it was told at the placement. `as_told`: learned by it alone. What is told to the requests under way
        then counts again and again, and the more of them there are, the further q swings."""
        told_beyond = actual > upper
        self.counted = COVERAGE_FADE * self.counted + 1.0
        self.within = COVERAGE_FADE * self.within + (not told_beyond)
        quantile = self._quantile(instance, predicted, work)
        beyond = told_beyond if as_told else actual > predicted * _factor(quantile)
        if (beyond and quantile >= WIDTH_MAX) or (not beyond and quantile <= 0.0):
            return
        if not as_told:
            aim = self.beyond - BEYOND_STEP * (told_beyond - (1 - COVERAGE))
            self.beyond = min(BEYOND_MAX, max(BEYOND_MIN, aim))
        step = (STEP_AS_TOLD if as_told else STEP) * (beyond - self.beyond)
        self.all += step
        self.by_seconds[_band(predicted)] += step
        self.by_waiting[_waits(predicted, work)] += step
        self.by_instance[instance] = self.by_instance.get(instance, FIRST_OF_INSTANCE) + step

    def forget(self, instance: InstanceId) -> None:
        self.by_instance.pop(instance, None)

    def _quantile(self, instance: InstanceId, predicted: EngineSeconds, work: EngineSeconds) -> float:
        shared = self.all + self.by_seconds[_band(predicted)] + self.by_waiting[_waits(predicted, work)]
        return shared + self.by_instance.get(instance, FIRST_OF_INSTANCE)


def _factor(quantile: float) -> float:
    return exp(min(WIDTH_MAX, max(0.0, quantile)))


def _band(predicted: EngineSeconds) -> int:
    return bisect_right(SECONDS_EDGES, predicted)


def _waits(predicted: EngineSeconds, work: EngineSeconds) -> bool:
    return predicted > WAITS_TIMES * work
