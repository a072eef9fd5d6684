"""Corrects the cost model of one instance by its observed prefills: Bayesian linear regression with the cost model as
prior. With the cost model's seconds `w` of the prefill work in an engine and its `t` uncached tokens,

`seconds = overhead * fixed + linear * (per_token * t - w) + factor * w`

`factor` scales the cost model (a slower machine), `overhead` adds the same to every first token, `linear` moves from the
cost model to seconds per token (a model that is wrong from prompt to prompt). The prior is 0, 0, 1; what observed
lengths do not tell apart stays there, so that a long prompt is not extrapolated from short ones.

Residuals are relative, and cut at CUT times their usual size (Huber): one outlier moves little. If the mean residual
shows that the speed has changed, everything is forgotten. Observations fade by FADE; they count less the longer they
are (variance grows with the predicted seconds)."""

from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from pointsman.contracts.fleet import PrefillCost
from pointsman.primitives import EngineSeconds, Tokens

CORRECTION_MIN, CORRECTION_MAX = 0.25, 4.0
"""Of a prediction over the cost model's."""
ERRORS_MAX = 100
WORK_MIN: EngineSeconds = 1e-6
FEATURE_MAX = 100.0
"""Over the predicted seconds: keeps absurd costs from exhausting the precision."""
FADE = 0.985
"""Per observation: about the last 65."""
PRIOR = (0.0, 0.0, 1.0)
PRIOR_PRECISION = (1.0, 1.0, 4.0)
"""Inverse squares of the standard deviations, (1, 1, 0.5)."""
PRECISION = 16.0
"""Of an observation: a relative error of 0.25."""

CUT = 2.5
SIZE_FIRST, SIZE_MIN, SIZE_MAX = 0.5, 0.03, 1.0
SIZE_FADE = 0.9
SIZE_JUMP = 4.0
"""One residual counts as at most so many times the usual one."""
BIAS_FADE = 0.92
CHANGED_SIZES, CHANGED_MIN = 0.6, 0.15
"""The speed has changed if the mean cut residual exceeds both: times the usual size, and by itself."""

Vector = tuple[float, float, float]


@dataclass(slots=True)
class Correction:
    cost: PrefillCost
    weights: Vector = PRIOR
    """Of overhead, linear and factor."""
    precision: list[float] = field(default_factory=lambda: [0.0] * 9)
    """3 x 3, of the faded observations alone; `moment` is theirs, too."""
    moment: list[float] = field(default_factory=lambda: [0.0] * 3)
    size: float = SIZE_FIRST
    """Root mean square of relative residuals."""
    bias: float = 0.0
    """Mean of cut residuals."""
    usual_seconds: EngineSeconds = 0.0
    usual_work: EngineSeconds = 0.0
    usual_tokens: float = 0.0
    observations: float = 0.0
    """Faded, as the usual values are."""
    errors: list[float] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        return median(self.errors) if self.errors else None

    @property
    def factor(self) -> float:
        """Of the usual first token over the cost model's."""
        if not self.usual_work:
            return 1.0
        return self.first_token_seconds(self.usual_work, self.usual_tokens) / self.usual_work

    def seconds(self, work: EngineSeconds, tokens: float) -> EngineSeconds:
        """Of work ahead of a prompt; `tokens`: uncached."""
        if not self.usual_work:
            return work
        (overhead, linear, factor), (fixed, by_tokens, _) = self.weights, self._features(work, tokens)
        return _bounded(overhead * fixed * work / self.usual_work + linear * by_tokens + factor * work, work)

    def first_token_seconds(self, work: EngineSeconds, tokens: float) -> EngineSeconds:
        """From the grant, with all work up to its own."""
        return _bounded(sum(w * x for w, x in zip(self.weights, self._features(work, tokens), strict=True)), work)

    def learn(self, *, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens = 0) -> None:
        """`predicted`: work by the cost model inside the engine at its grant, its own included; `tokens`: uncached
        tokens of that work."""
        if predicted < WORK_MIN or observed < 0:
            return
        expected = self.first_token_seconds(predicted, tokens)
        if observed > 0:
            self.errors.append(abs(expected - observed) / observed)
            del self.errors[:-ERRORS_MAX]
        self._note_usual(expected, predicted, tokens)
        residual = (observed - expected) / expected
        size = self.size
        self._note_residual(residual)
        if abs(self.bias) > max(CHANGED_MIN, CHANGED_SIZES * self.size):
            self.precision, self.moment = [0.0] * 9, [0.0] * 3
            self.bias, self.size = 0.0, max(SIZE_FIRST, self.size)
            size = self.size
        scale = sqrt(expected) * sqrt(self.usual_seconds)
        features = [_within(x / scale, FEATURE_MAX) for x in self._features(predicted, tokens)]
        target = expected * (1 + _within(residual, CUT * size)) / scale
        for row in range(3):
            self.moment[row] = FADE * self.moment[row] + PRECISION * features[row] * target
            for column in range(3):
                place = 3 * row + column
                self.precision[place] = FADE * self.precision[place] + PRECISION * features[row] * features[column]
        self.weights = _solution(self.precision, self.moment)

    def _features(self, work: EngineSeconds, tokens: float) -> Vector:
        cost = self.cost
        return cost.fixed_s + cost.floor_s, cost.per_token_s * tokens - work, work

    def _note_usual(self, seconds: EngineSeconds, work: EngineSeconds, tokens: Tokens) -> None:
        self.observations = FADE * self.observations + 1.0
        share = 1.0 / self.observations
        self.usual_seconds += share * (seconds - self.usual_seconds)
        self.usual_work += share * (work - self.usual_work)
        self.usual_tokens += share * (tokens - self.usual_tokens)

    def _note_residual(self, residual: float) -> None:
        self.bias = BIAS_FADE * self.bias + (1 - BIAS_FADE) * _within(residual, CUT * self.size)
        square = SIZE_FADE * self.size**2 + (1 - SIZE_FADE) * _within(residual, SIZE_JUMP * self.size) ** 2
        self.size = min(SIZE_MAX, max(SIZE_MIN, sqrt(square)))


def _bounded(seconds: EngineSeconds, work: EngineSeconds) -> EngineSeconds:
    return min(CORRECTION_MAX * work, max(CORRECTION_MIN * work, seconds))


def _within(value: float, bound: float) -> float:
    return min(bound, max(-bound, value))


def _solution(precision: list[float], moment: list[float]) -> Vector:
    """Least squares with the prior, by elimination: the matrix is positive definite."""
    a, b, c = (precision[4 * i] + PRIOR_PRECISION[i] for i in range(3))
    d, e, f = precision[1], precision[2], precision[5]
    x, y, z = (moment[i] + PRIOR_PRECISION[i] * PRIOR[i] for i in range(3))
    b, f, y = b - d * d / a, f - d * e / a, y - d * x / a
    c, z = c - e * e / a, z - e * x / a
    c, z = c - f * f / b, z - f * y / b
    third = z / c
    second = (y - f * third) / b
    return (x - d * second - e * third) / a, second, third
