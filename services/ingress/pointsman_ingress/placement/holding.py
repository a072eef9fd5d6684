"""Requests that wait in the ingress because there is no engine that could be asked: for a bounded time and number.

While the leader answers it holds them (`policies.dispatch`). Here wait those that cannot get as far: the log has not been read
to its end yet, no engine has ever joined so that nobody knows the model, or nobody leads and no engine is there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pointsman.ports import Clock
from pointsman.primitives import Seconds
from pointsman.runtime.telemetry import INGRESS_PENDING_REQUESTS

T = TypeVar("T")

HELD_REQUESTS_MAX = 1_000
"""Requests that wait at once."""
LOOK_WALL_SECONDS: Seconds = 0.02
LOOK_WALL_SECONDS_MAX: Seconds = 0.5
"""Pauses before it is looked again; they double."""


@dataclass(frozen=True, slots=True)
class HoldBounds:
    """`wall_seconds` for which one request waits."""

    wall_seconds: Seconds = 30.0


class Hold:
    """Of one ingress, for all of its pools."""

    def __init__(self, bounds: HoldBounds, clock: Clock) -> None:
        self._bounds = bounds
        self._clock = clock
        self._held = 0

    async def until(self, found: Callable[[], T | None]) -> T | None:
        """What `found` gives, once it gives something. None where that takes too long or too many wait already. Raises what
        `found` raises."""
        if (thing := found()) is not None:
            return thing
        if self._held >= HELD_REQUESTS_MAX:
            return None
        self._held += 1
        INGRESS_PENDING_REQUESTS.inc()
        try:
            async with asyncio.timeout(self._bounds.wall_seconds):
                return await self._look(found)
        except TimeoutError:
            return None
        finally:
            self._held -= 1
            INGRESS_PENDING_REQUESTS.dec()

    async def _look(self, found: Callable[[], T | None]) -> T:
        pause = LOOK_WALL_SECONDS
        while (thing := found()) is None:
            await self._clock.sleep_wall(pause)
            pause = min(2 * pause, LOOK_WALL_SECONDS_MAX)
        return thing
