"""Desired size of the pool: the newest scaling decision, and whether it is applied. Of two decisions with one number
the first in the log counts."""

from dataclasses import dataclass
from typing import NamedTuple

from pointsman.contracts.decisions import ScaleApplied, ScaleDecided
from pointsman.primitives import EngineSeconds

CLOCKS_APART_MAX: EngineSeconds = 5.0


class Changes(NamedTuple):
    """When a pool changed last: to more instances, to fewer, and in its roles only. Engine time."""

    up: EngineSeconds
    down: EngineSeconds
    switched: EngineSeconds


@dataclass(slots=True)
class Scaling:
    """`up_at`, `down_at`, `switched_at`: last decision to raise, to lower, and to change roles only; engine time."""

    decided: ScaleDecided | None = None
    applied: ScaleApplied | None = None
    up_at: EngineSeconds = float("-inf")
    down_at: EngineSeconds = float("-inf")
    switched_at: EngineSeconds = float("-inf")

    @property
    def number(self) -> int:
        return self.decided.number if self.decided else 0

    @property
    def highest_number(self) -> int:
        return max(self.number, self.applied.number if self.applied else 0)

    @property
    def wanted(self) -> int | None:
        return self.decided.wanted if self.decided else None

    @property
    def is_applied(self) -> bool:
        return self.applied is not None and self.applied.number == self.number

    def changed_at(self, now: EngineSeconds) -> Changes:
        """What a scaler with a wrong clock has dated far ahead holds nobody back."""
        dated = (self.up_at, self.down_at, self.switched_at)
        return Changes(*(at if at <= now + CLOCKS_APART_MAX else float("-inf") for at in dated))

    def decide(self, event: ScaleDecided) -> None:
        if event.number <= self.number:
            return
        before = self.decided.wanted if self.decided else event.current
        if event.wanted > before:
            self.up_at = event.at
        elif event.wanted < before:
            self.down_at = event.at
        elif self.decided and (event.prefill, event.decode) != (self.decided.prefill, self.decided.decode):
            self.switched_at = event.at
        self.decided = event

    def apply(self, event: ScaleApplied) -> None:
        if self.applied is None or event.number > self.applied.number:
            self.applied = event
