"""A process's own clock: as wrong about the date as the seed wants it, and right about how time passes, unless its machine
was suspended: then it does not know."""

import asyncio

from typing_extensions import override

from pointsman.adapters.clocks import ANCHOR_UNIX_SECONDS, ScaledClock, engine_time_of
from pointsman.primitives import Seconds, WallSeconds

BEGIN_SECONDS = 86_400.0
"""The simulated world begins a day after the anchor."""
UPTIME_SECONDS = 5_000.0
"""What monotonic clocks show then."""


class SkewedClock(ScaledClock):
    """Virtual time, seen by a process whose date is `skew` wall seconds ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, speed: float) -> None:
        super().__init__(speed)
        self._loop = loop
        self.skew: Seconds = 0.0
        self.asleep: Seconds = 0.0
        """For how long its machine was suspended: monotonic clocks stood still."""

    @property
    def unix(self) -> Seconds:
        """The date that this process believes in, as Unix time."""
        return ANCHOR_UNIX_SECONDS + BEGIN_SECONDS + self._loop.time() + self.skew

    @override
    def now(self) -> Seconds:
        return engine_time_of(self.unix, self.speed)

    @override
    def wall(self) -> WallSeconds:
        return WallSeconds(UPTIME_SECONDS + self._loop.time() - self.asleep)


class EngineClock(SkewedClock):
    """By which an engine computes, whatever its process's date is: it can be made slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, speed: float) -> None:
        super().__init__(loop, speed=speed)
        self._slowness = 1.0
        self._changed_at: Seconds = super().now()
        self._shown_then = self._changed_at

    def slow_down(self, factor: float) -> None:
        """From now on everything takes `factor` times as long; a step in flight ends when it would have."""
        shown = self.now()
        self._changed_at, self._shown_then, self._slowness = super().now(), shown, factor

    @override
    def now(self) -> Seconds:
        return self._shown_then + (super().now() - self._changed_at) / self._slowness

    @override
    async def sleep(self, seconds: Seconds) -> None:
        await super().sleep(seconds * self._slowness)
