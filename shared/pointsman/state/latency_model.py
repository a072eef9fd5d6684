"""How long a prefill will take on one instance, corrected by how long prefills really took there.

The base is Mooncake's polynomial (`contracts.fleet.PrefillCost`). What it leaves out (decode steps in between,
a slow machine, a wrong profile) is learned as one factor per instance: seconds that prefills took over seconds
that were predicted, both sums fading, so that long prefills weigh more than short ones.
"""

from dataclasses import dataclass

from pointsman.primitives import Seconds

FADE = 0.97
"""Weight that the sums keep at each observation: about the last 30 prefills count."""

PRIOR_SECONDS = 2.0
"""The polynomial counts like this many observed seconds until real ones come in."""

CORRECTION_MIN, CORRECTION_MAX = 0.25, 4.0


@dataclass(slots=True)
class Correction:
    """The learned factor of one instance."""

    observed: Seconds = PRIOR_SECONDS
    predicted: Seconds = PRIOR_SECONDS

    @property
    def factor(self) -> float:
        return min(CORRECTION_MAX, max(CORRECTION_MIN, self.observed / self.predicted))

    def learn(self, *, predicted: Seconds, observed: Seconds) -> None:
        """Take in one prefill: what the polynomial said, waiting inside the engine included, and what it took."""
        if predicted <= 0 or observed < 0:
            return
        self.observed = FADE * self.observed + min(observed, CORRECTION_MAX * 2 * predicted)
        self.predicted = FADE * self.predicted + predicted
