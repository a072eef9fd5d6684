"""How long prefills take on one instance: the cost model, corrected by what was observed, and a second opinion.

The base is Mooncake's polynomial (`contracts.fleet.PrefillCost`). What it leaves out (decode steps in between, a
slow machine, a wrong profile) is learned as one factor: seconds that prefills took over seconds that were predicted,
both sums fading, so that long prefills weigh more than short ones.

The polynomial may also be wrong from prompt to prompt. Tokens cannot be: so the seconds per uncached token are
learned as well, and both opinions are weighed by how far off each has been. Where the polynomial is right the
second opinion has no say.

How wrong the two together were is kept for people to see; nothing is decided by it.
"""

from dataclasses import dataclass, field
from statistics import median

from pointsman.primitives import Seconds, Tokens

FADE = 0.97
"""Weight that the sums keep at each observation: about the last 30 prefills count."""

PRIOR_SECONDS = 2.0
"""The polynomial counts like this many observed seconds until real ones come in."""

CORRECTION_MIN, CORRECTION_MAX = 0.25, 4.0
ERRORS_MAX = 100
TRUST_POWER = 2
"""How sharply the worse opinion loses its say: the weights are squared errors to this power, inverted."""


@dataclass(slots=True)
class Correction:
    """What one instance has taught. Sums fade."""

    observed: Seconds = PRIOR_SECONDS
    predicted: Seconds = PRIOR_SECONDS
    token_seconds: Seconds = 0.0
    tokens: float = 0.0
    cost_errors: float = 0.0
    """Squared errors of the corrected cost model, square seconds."""
    token_errors: float = 0.0
    """Squared errors of seconds by tokens."""
    errors: list[float] = field(default_factory=list)
    """How far off each of the last ERRORS_MAX predictions was, as a share of what was observed."""
    factor: float = 1.0
    """The correction of the cost model. This and the next follow from the sums; every prediction asks for them."""
    token_share: float = 0.0
    """The say of the second opinion."""

    @property
    def error(self) -> float | None:
        """Median absolute error of the last predictions, as a share; None before there was one."""
        return median(self.errors) if self.errors else None

    def seconds(self, work: Seconds, tokens: Tokens) -> Seconds:
        """What `work` seconds by the cost model, for so many uncached tokens, will really take."""
        corrected = work * self.factor
        if not self.token_share:
            return corrected
        return corrected + self.token_share * (tokens * self.token_seconds / self.tokens - corrected)

    def learn(self, *, predicted: Seconds, observed: Seconds, tokens: Tokens = 0) -> None:
        """Take in one prefill: the cost model's work inside the engine when it was granted, its own included, the
        uncached tokens of that work, and the seconds it took."""
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
            self.token_errors = self.cost_errors  # the first prefill says nothing about tokens: as far off as the other
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
