"""Engine time: from a fixed instant on, it passes `speed` times faster than Unix time."""

import asyncio
import time

from typing_extensions import override

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, Seconds, WallSeconds, engine_seconds, engine_time_of

BEHIND_WALL_SECONDS_MAX: WallSeconds = WallSeconds(3600.0)
CATCHING_UP_PACE = 0.9
"""Durations measured meanwhile are a tenth too short."""


def loop_seconds() -> Seconds:
    """The time of the running event loop, which a simulation may turn."""
    return asyncio.get_running_loop().time()


class ScaledClock(Clock):
    def __init__(self, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError(f"speed must be positive, not {speed}")
        self._speed = speed

    @property
    @override
    def speed(self) -> float:
        return self._speed

    @override
    def now(self) -> EngineSeconds:
        return engine_time_of(time.time(), self._speed)

    @override
    def wall(self) -> WallSeconds:
        return WallSeconds(time.monotonic())

    @override
    async def sleep(self, seconds: EngineSeconds) -> None:
        await asyncio.sleep(max(0.0, seconds) / self._speed)

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        await asyncio.sleep(float(seconds))


class _ClockOver(Clock):
    """Another clock, but for its dates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @property
    @override
    def speed(self) -> float:
        return self._clock.speed

    @override
    def wall(self) -> WallSeconds:
        return self._clock.wall()

    @override
    async def sleep(self, seconds: EngineSeconds) -> None:
        await self._clock.sleep(seconds)

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        await self._clock.sleep_wall(seconds)


class SteadyClock(_ClockOver):
    """`clock` as it is now, and the monotonic time from now on: nobody can set it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._ahead = clock.now() - engine_seconds(clock.wall(), clock.speed)

    @override
    def now(self) -> EngineSeconds:
        return self._ahead + engine_seconds(self.wall(), self.speed)


class ForwardClock(_ClockOver):
    """`clock`, but its dates do not go back: where `clock` is behind them, they pass slower until it has caught up. If it is
    behind by more than BEHIND_WALL_SECONDS_MAX, what they were was wrong, and they are its dates at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._shown = self._read = clock.now()
        self._behind_max = engine_seconds(BEHIND_WALL_SECONDS_MAX, clock.speed)

    @override
    def now(self) -> EngineSeconds:
        read, before = self._clock.now(), self._read
        shown = self._shown + CATCHING_UP_PACE * max(0.0, read - before)
        self._read, self._shown = read, read if shown - read > self._behind_max else max(read, shown)
        return self._shown

    def begin(self, date: EngineSeconds) -> None:
        """From here on not before `date`, whatever it has shown so far."""
        self._read = self._clock.now()
        self._shown = max(self._read, date)
