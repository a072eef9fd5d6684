"""Engine time: from a fixed instant on, it passes `speed` times faster than Unix time."""

import asyncio
import time

from typing_extensions import override

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, Seconds, WallSeconds, engine_seconds, engine_time_of


def loop_seconds() -> Seconds:
    """The time of the running event loop, which a simulation may turn."""
    return asyncio.get_running_loop().time()


class ScaledClock(Clock):
    def __init__(self, speed: float = 1.0) -> None:
        if not speed > 0:
            msg = f"speed must be positive, not {speed}"
            raise ValueError(msg)
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


class SteadyClock(Clock):
    """`clock` as it is now, and the monotonic time from now on: nobody can set it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = clock.now() - engine_seconds(clock.wall(), clock.speed)

    @property
    @override
    def speed(self) -> float:
        return self._clock.speed

    @override
    def now(self) -> EngineSeconds:
        return self._ahead + engine_seconds(self.wall(), self.speed)

    @override
    def wall(self) -> WallSeconds:
        return self._clock.wall()

    @override
    async def sleep(self, seconds: EngineSeconds) -> None:
        await self._clock.sleep(seconds)

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        await self._clock.sleep_wall(seconds)
