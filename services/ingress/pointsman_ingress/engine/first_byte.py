"""Deadline for an engine's first byte: a multiple of the predicted TTFT, plus the output at the TPOT SLO if not
streamed."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from pointsman.primitives import EngineSeconds, WallSeconds
from pointsman_ingress.engine.client import EngineFailedError
from pointsman_ingress.settings import IngressSettings

FOREVER: EngineSeconds = math.inf

STALL_WALL_SECONDS: WallSeconds = WallSeconds(0.25)  # a timer this late means that the process stalled, not the engine


def first_byte_wall_seconds(
    settings: IngressSettings, expected: EngineSeconds = 0.0, *, output: EngineSeconds = 0.0, speed: float = 1.0
) -> EngineSeconds:
    """`expected`: engine seconds to the first token; `output`: engine seconds from there to the first byte."""
    if not settings.first_byte_factor:
        return FOREVER
    return max(settings.first_byte_seconds_min, settings.first_byte_factor * expected / speed) + output / speed


class FirstByteDeadline:
    """After `wall_seconds` or `expire` calls `give_up(waited_seconds)`: True raises EngineFailedError, False restarts
    the wait. Does not count time during which this process stalled."""

    def __init__(self, wall_seconds: EngineSeconds, give_up: Callable[[EngineSeconds], bool]) -> None:
        self._wall_seconds = wall_seconds
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = asyncio.timeout(None)
        self._began = self._loop.time()

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._wait(self._wall_seconds)

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError as timeout:
            reason = f"it sent nothing for {self._loop.time() - self._began:.3g} s"
            raise EngineFailedError(reason, failure="first_byte_timeout") from timeout

    def expire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._decide()

    def _wait(self, wall_seconds: EngineSeconds) -> None:
        if wall_seconds < FOREVER:
            due = self._loop.time() + wall_seconds
            self._timer = self._loop.call_at(due, self._on_timer, due)

    def _on_timer(self, due: EngineSeconds) -> None:
        late = self._loop.time() - due
        if WallSeconds(late) > STALL_WALL_SECONDS:
            self._wait(late)
        else:
            self._decide()

    def _decide(self) -> None:
        if self._give_up(self._loop.time() - self._began):
            self._timeout.reschedule(self._loop.time())
        else:
            self._wait(self._wall_seconds)
