"""Requests that wait in the ingress for an engine: bounded in time and number.

A leader that answers queues requests itself (`policies.dispatch`). Here wait those that cannot get there: the log is not
read yet, no engine has ever joined, or there is neither leader nor engine.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pointsman.adapters.backoff import Backoff
from pointsman.ports import Clock
from pointsman.primitives import Seconds, WallSeconds
from pointsman.runtime.telemetry import INGRESS_PENDING_REQUESTS

T = TypeVar("T")

HELD_REQUESTS_MAX = 1_000
POLL_WALL_SECONDS: WallSeconds = WallSeconds(0.02)
POLL_WALL_SECONDS_MAX: WallSeconds = WallSeconds(0.5)


class HoldQueue:
    def __init__(self, wall_seconds: Seconds, clock: Clock) -> None:
        """`wall_seconds`: how long one request waits."""
        self._wall_seconds = wall_seconds
        self._clock = clock
        self._held = 0

    async def until(self, find: Callable[[], T | None]) -> T | None:
        """The first result of `find` that is not None; None if that takes too long or too many wait. Raises what `find`
        raises."""
        if (found := find()) is not None:
            return found
        if self._held >= HELD_REQUESTS_MAX:
            return None
        self._held += 1
        INGRESS_PENDING_REQUESTS.inc()
        backoff = Backoff(POLL_WALL_SECONDS, POLL_WALL_SECONDS_MAX)
        try:
            async with asyncio.timeout(self._wall_seconds):
                while (found := find()) is None:
                    await self._clock.sleep_wall(backoff.next_wait())
                return found
        except TimeoutError:
            return None
        finally:
            self._held -= 1
            INGRESS_PENDING_REQUESTS.dec()
