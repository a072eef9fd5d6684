"""Corrects the cost model of one instance by its observed prefills: two learned estimates, weighted by their past errors
(decisions 17, 65). A factor on the cost model (fading sums of observed over predicted seconds), and seconds per uncached
token, which count in full after RAMP prefills, and up to FAR times the most tokens of the last observations: work of a
whole engine, thus of several prompts. Of one prompt they count up to LONG times the longest."""

from dataclasses import dataclass, field
from statistics import median

from pointsman.primitives import EngineSeconds, Tokens

FADE = 0.97
"""Per observation: about the last 30 prefills."""

PRIOR_SECONDS = 2.0

CORRECTION_MIN, CORRECTION_MAX = 0.25, 4.0
ERRORS_MAX = 100
TRUST_POWER = 2
"""Weights are inverse squared errors to this power."""

RAMP = 10
FAR = 4.0
LONG = 2.0
LONGEST_FADE = 0.998
"""Per observation: a length that was seen long ago was still seen."""


@dataclass(slots=True)
class Correction:
    by_length: bool = True
    """False before fold version 6: seconds per token count in full at once, and at every length."""
    observed: EngineSeconds = PRIOR_SECONDS
    predicted: EngineSeconds = PRIOR_SECONDS
    token_seconds: EngineSeconds = 0.0
    tokens: float = 0.0
    observations: int = 0
    most_tokens: float = 0.0
    """Of an observation, fading."""
    longest: float = 0.0
    """Uncached tokens of one prompt, fading."""
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
        """Of any number of prompts. `work`: seconds by the cost model; `tokens`: uncached."""
        return self._seconds(work, tokens, FAR * self.most_tokens)

    def prompt_seconds(self, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of one prompt."""
        return self._seconds(work, tokens, LONG * self.longest)

    def _seconds(self, work: EngineSeconds, tokens: Tokens, known: float) -> EngineSeconds:
        """`known`: tokens up to which seconds per token count in full."""
        corrected, share = work * self.factor, self.token_share
        if not share:
            return corrected
        if self.by_length and tokens > known:
            share *= known / tokens
        return corrected + share * (tokens * self.token_seconds / self.tokens - corrected)

    def learn(
        self, *, predicted: EngineSeconds, observed: EngineSeconds, tokens: Tokens = 0, own_tokens: Tokens = 0
    ) -> None:
        """`predicted`: work by the cost model inside the engine at its grant, its own included; `tokens`: uncached
        tokens of that work; `own_tokens`: of the prompt itself."""
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
        self.observations += 1
        self.most_tokens = max(FADE * self.most_tokens, tokens)
        self.longest = max(LONGEST_FADE * self.longest, own_tokens)
        self.factor = min(CORRECTION_MAX, max(CORRECTION_MIN, self.observed / self.predicted))
        self.token_share = self._share_of_tokens()

    def _share_of_tokens(self) -> float:
        against_cost = self.cost_errors**TRUST_POWER
        if not self.tokens or not against_cost:
            return 0.0
        share = against_cost / (against_cost + self.token_errors**TRUST_POWER)
        return share * min(1.0, self.observations / RAMP) if self.by_length else share
