"""How large the pool shall be: the newest decision of the scaler, and whether it is carried out.

Decisions are numbered. Of two with one number, which two scalers may make at once, the first in the log counts; so
everyone who folds the log agrees on what was decided, whoever decided it.
"""

from dataclasses import dataclass

from pointsman.contracts.decisions import ScaleApplied, ScaleDecided
from pointsman.primitives import Seconds


@dataclass(slots=True)
class Scaling:
    """`up_at`, `down_at`: when the size was last raised and lowered, by decision, engine time."""

    decided: ScaleDecided | None = None
    applied: ScaleApplied | None = None
    up_at: Seconds = float("-inf")
    down_at: Seconds = float("-inf")

    @property
    def number(self) -> int:
        """Of the newest decision; 0 while there is none."""
        return self.decided.number if self.decided else 0

    @property
    def highest_number(self) -> int:
        """Of any decision that the log tells of: one may be lost of which only the outcome is there."""
        return max(self.number, self.applied.number if self.applied else 0)

    @property
    def wanted(self) -> int | None:
        """How many instances there shall be; None while nobody has decided."""
        return self.decided.wanted if self.decided else None

    @property
    def is_applied(self) -> bool:
        return self.applied is not None and self.applied.number == self.number

    def decide(self, event: ScaleDecided) -> None:
        """Take in a decision; one that is not newer than the last is passed over."""
        if event.number <= self.number:
            return
        before = self.decided.wanted if self.decided else event.current
        if event.wanted > before:
            self.up_at = event.at
        elif event.wanted < before:
            self.down_at = event.at
        self.decided = event

    def apply(self, event: ScaleApplied) -> None:
        if self.applied is None or event.number > self.applied.number:
            self.applied = event
