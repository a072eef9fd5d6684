"""Predicts prefill seconds: the cost model of an instance, corrected by observations. The base is Mooncake's polynomial
(`contracts.fleet.PrefillCost`). Two learned estimates are weighted by their past errors: a factor on the polynomial
(fading sums of observed over predicted seconds), and seconds per uncached token."""

from dataclasses import dataclass, field
from statistics import median

from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.engine_profiles import prefill_seconds
from pointsman.state.fleet import Instance

FADE = 0.97
"""Per observation: about the last 30 prefills."""

PRIOR_SECONDS = 2.0

CORRECTION_MIN, CORRECTION_MAX = 0.25, 4.0
ERRORS_MAX = 100
TRUST_POWER = 2
"""Weights are inverse squared errors to this power."""


@dataclass(slots=True)
class Correction:
    observed: EngineSeconds = PRIOR_SECONDS
    predicted: EngineSeconds = PRIOR_SECONDS
    token_seconds: EngineSeconds = 0.0
    tokens: float = 0.0
    cost_errors: float = 0.0
    token_errors: float = 0.0
    errors: list[float] = field(default_factory=list)
    factor: float = 1.0
    """On the cost model. Derived from the sums, as is `token_share`."""
    token_share: float = 0.0

    @property
    def error(self) -> float | None:
        return median(self.errors) if self.errors else None

    def seconds(self, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """`work`: seconds by the cost model; `tokens`: uncached."""
        corrected = work * self.factor
        if not self.token_share:
            return corrected
        return corrected + self.token_share * (tokens * self.token_seconds / self.tokens - corrected)

    def learn(self, *, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens = 0) -> None:
        """`predicted`: work by the cost model inside the engine at its grant, its own included; `tokens`: uncached
        tokens of that work."""
        if predicted <= 0 or observed < 0:
            return
        if observed > 0:
            self.errors.append(abs(self.seconds(predicted, tokens) - observed) / observed)
            del self.errors[:-ERRORS_MAX]
        observed = min(observed, CORRECTION_MAX * 2 * predicted)
        self.cost_errors = FADE * self.cost_errors + (observed - predicted * self.factor) ** 2
        if self.tokens:
            by_tokens = tokens * self.token_seconds / self.tokens
            self.token_errors = FADE * self.token_errors + (observed - by_tokens) ** 2
        else:
            self.token_errors = self.cost_errors  # nothing is known of tokens yet
        self.observed = FADE * self.observed + observed
        self.predicted = FADE * self.predicted + predicted
        self.token_seconds = FADE * self.token_seconds + observed
        self.tokens = FADE * self.tokens + tokens
        self.factor = min(CORRECTION_MAX, max(CORRECTION_MIN, self.observed / self.predicted))
        self.token_share = self._share_of_tokens()

    def _share_of_tokens(self) -> float:
        against_cost = self.cost_errors**TRUST_POWER
        if not self.tokens or not against_cost:
            return 0.0
        return against_cost / (against_cost + self.token_errors**TRUST_POWER)


class LatencyModel:
    def __init__(self, block_tokens: Tokens) -> None:
        self._block_tokens = block_tokens
        self.corrections: dict[InstanceId, Correction] = {}

    def cached_tokens(self, instance: Instance, hit_blocks: int, prompt_tokens: Tokens) -> Tokens:
        """Prompt tokens that a hit saves: whole engine blocks, and never the last token, which is always computed."""
        if not hit_blocks:
            return 0
        usable = (prompt_tokens - 1) // instance.engine_block_tokens * instance.engine_block_tokens
        return max(0, min(hit_blocks * self._block_tokens, usable))

    def prefill_seconds(self, instance: Instance, prompt_tokens: Tokens, cached_tokens: Tokens) -> EngineSeconds:
        """By the uncorrected cost model."""
        return prefill_seconds(instance.cost, prompt_tokens, cached_tokens)

    def expected_seconds(self, instance: InstanceId, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        correction = self.corrections.get(instance)
        return correction.seconds(work, tokens) if correction else work

    def correction(self, instance: InstanceId) -> float:
        """Factor on the cost model; 1 if nothing was learned."""
        correction = self.corrections.get(instance)
        return correction.factor if correction else 1.0

    def prediction_error(self, instance: InstanceId) -> float | None:
        correction = self.corrections.get(instance)
        return correction.error if correction else None

    def learn(self, instance: InstanceId, *, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens) -> None:
        correction = self.corrections.setdefault(instance, Correction())
        correction.learn(predicted=predicted, observed=observed, tokens=tokens)

    def forget(self, instance: InstanceId) -> None:
        self.corrections.pop(instance, None)
