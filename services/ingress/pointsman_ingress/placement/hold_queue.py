"""Bounded wait for an engine, for requests that no leader queues, for instance before an engine has joined. Each owner
(a tenant, else a client's address) has half of the places at most."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from pointsman.adapters.backoff import Backoff
from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.telemetry import INGRESS_HELD_REQUESTS

T = TypeVar("T")

HELD_REQUESTS_MAX = 1_000
HELD_REQUESTS_SHARE = HELD_REQUESTS_MAX // 2
POLL_WALL_SECONDS: WallSeconds = WallSeconds(0.02)
POLL_WALL_SECONDS_MAX: WallSeconds = WallSeconds(0.5)


class HoldQueue:
    def __init__(self, wall_seconds: WallSeconds, clock: Clock) -> None:
        self._wall_seconds = wall_seconds
        self._clock = clock
        self._waiting: Counter[str] = Counter()

    async def until(self, find: Callable[[], T | None], *, owner: str) -> T | None:
        """Polls `find`. Returns None on timeout or if there is no place. Raises what `find` raises."""
        if (found := find()) is not None:
            return found
        if self._waiting.total() >= HELD_REQUESTS_MAX or self._waiting[owner] >= HELD_REQUESTS_SHARE:
            return None
        self._waiting[owner] += 1
        INGRESS_HELD_REQUESTS.inc()
        backoff = Backoff(POLL_WALL_SECONDS, POLL_WALL_SECONDS_MAX)
        try:
            async with asyncio.timeout(float(self._wall_seconds)):
                while (found := find()) is None:
                    await self._clock.sleep_wall(backoff.next_wait())
                return found
        except TimeoutError:
            return None
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]
            INGRESS_HELD_REQUESTS.dec()
