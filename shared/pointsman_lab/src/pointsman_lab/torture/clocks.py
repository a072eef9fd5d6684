"""A process's own clock, with a date skew. A suspended machine's monotonic clock does not advance."""

import asyncio
from random import Random

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import ANCHOR_UNIX_SECONDS, EngineSeconds, WallSeconds, engine_time_of

BEGIN_SECONDS = 86_400.0
UPTIME_SECONDS = 5_000.0
LASTING_SHARE = 0.3
"""Of all seeds, the share with lasting skews."""


class SkewedClock(ScaledClock):
    def __init__(self, loop: asyncio.AbstractEventLoop, *, speed: float) -> None:
        super().__init__(speed)
        self._loop = loop
        self.skew: EngineSeconds = 0.0
        self.asleep: EngineSeconds = 0.0

    @property
    def unix(self) -> EngineSeconds:
        return ANCHOR_UNIX_SECONDS + BEGIN_SECONDS + self._loop.time() + self.skew

    @override
    def now(self) -> EngineSeconds:
        return engine_time_of(self.unix, self.speed)

    @override
    def wall(self) -> WallSeconds:
        return WallSeconds(UPTIME_SECONDS + self._loop.time() - self.asleep)


def lasting_skew(seed: int, process: str) -> EngineSeconds:
    """By which its date is off from the start to the end, faults or not: hosts without NTP."""
    if Random(f"lasting skews {seed}").random() >= LASTING_SHARE:
        return 0.0
    own = Random(f"lasting skew {seed} {process}")
    return own.choice((-1, 1)) * own.choice((0.0, 0.05, 0.4, 1.5, 6.0, 60.0, 3600.0))


class EngineClock(SkewedClock):
    def __init__(self, loop: asyncio.AbstractEventLoop, *, speed: float) -> None:
        super().__init__(loop, speed=speed)
        self._slowness = 1.0
        self._changed_at: EngineSeconds = super().now()
        self._shown_then = self._changed_at

    def slow_down(self, factor: float) -> None:
        """`factor` applies to all later time; a step in flight ends when it would have."""
        shown = self.now()
        self._changed_at, self._shown_then, self._slowness = super().now(), shown, factor

    @override
    def now(self) -> EngineSeconds:
        return self._shown_then + (super().now() - self._changed_at) / self._slowness

    @override
    async def sleep(self, seconds: EngineSeconds) -> None:
        await super().sleep(seconds * self._slowness)
