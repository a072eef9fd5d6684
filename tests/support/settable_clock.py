"""Clocks that a test sets."""

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import EngineSeconds, WallSeconds


class SettableClock(ScaledClock):
    """Of a machine that was suspended without its wall time, or whose clock somebody set."""

    set_by = 0.0
    """Unix seconds."""
    waited = WallSeconds(0.0)
    """That have passed without a test."""

    @override
    def now(self) -> EngineSeconds:
        return super().now() + (self.set_by + float(self.waited)) * self.speed

    @override
    def wall(self) -> WallSeconds:
        return super().wall() + self.waited


class StandingClock(ScaledClock):
    """Both times stand where a test puts them."""

    at = 1000.0

    @override
    def now(self) -> EngineSeconds:
        return self.at * self.speed

    @override
    def wall(self) -> WallSeconds:
        return WallSeconds(self.at)
