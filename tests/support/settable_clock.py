"""A clock that somebody sets."""

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import EngineSeconds


class SettableClock(ScaledClock):
    """Of a machine that was suspended without its wall time, or whose clock somebody set."""

    set_by = 0.0
    """Unix seconds."""

    @override
    def now(self) -> EngineSeconds:
        return super().now() + self.set_by * self.speed
