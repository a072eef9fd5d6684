"""A token bucket in engine time. It may be overdrawn: what is taken beyond its level is paid back before anything else is
available. Over any span it gives at most `size + rate * span`, and once what was taken last."""

from dataclasses import dataclass

from pointsman.primitives import EngineSeconds

ROUNDING_SECONDS: EngineSeconds = 1e-6
"""Resolution of engine time, about: what becomes available so soon is available."""


@dataclass(slots=True)
class TokenBucket:
    """`rate`: per engine second. `at`: when `level` was true; an earlier `now` counts as `at`."""

    rate: float
    size: float
    level: float
    at: EngineSeconds

    def level_at(self, now: EngineSeconds) -> float:
        return min(self.size, self.level + self.rate * max(0.0, now - self.at))

    def seconds_until(self, amount: float, now: EngineSeconds) -> EngineSeconds:
        """Until the level is `amount`, or the bucket full."""
        missing = min(amount, self.size) - self.level_at(now)
        seconds = missing / self.rate
        return seconds if seconds > ROUNDING_SECONDS else 0.0

    def take(self, amount: float, now: EngineSeconds) -> None:
        """`amount` below 0 gives back; what a full bucket cannot hold is lost."""
        self.level = min(self.size, self.level_at(now) - amount)
        self.at = max(self.at, now)

    def resized(self, rate: float, size: float, now: EngineSeconds) -> "TokenBucket":
        return TokenBucket(rate, size, min(size, self.level_at(now)), max(self.at, now))
