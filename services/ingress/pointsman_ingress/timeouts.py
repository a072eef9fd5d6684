"""Timeouts of a request by phase, and the deadline for an engine's first byte.

| phase | bound |
|---|---|
| connect | `--connect-timeout`, wall (`proxy.open_session`) |
| first byte | a multiple of the predicted time to it, at least `--first-byte-seconds-min` wall (here) |
| between chunks | `--chunk-timeout-seconds`, wall (`proxy.EngineAnswer`) |
| whole request | `--request-timeout-seconds`, wall (`patience`) |

The first byte of a stream is its first output. An answer that is not streamed has its first byte only at its end, so the
time that its output may take is added: the most tokens it may have, at the rate of its TPOT objective, or of `--slo-tpot-seconds`
where that is slower. Where nobody bounds its tokens it has no deadline.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from pointsman.primitives import Seconds
from pointsman_ingress.engine.proxy import EngineFailedError

FOREVER: Seconds = math.inf

STOOD_STILL_WALL_SECONDS: Seconds = 0.25
"""A deadline that is noticed so much too late says that this process did not run, and not that an engine is slow."""


@dataclass(frozen=True, slots=True)
class FirstByteBounds:
    """`factor`: how many times the predicted seconds an engine may take; 0: any time. `least`: wall seconds that it always
    may take."""

    factor: float
    least: Seconds

    def wall_seconds(self, expected: Seconds, *, output: Seconds = 0.0, speed: float) -> Seconds:
        """From sending to the first byte. `expected`: engine seconds to the first token; `output`: engine seconds that
        follow it before anything is sent."""
        if not self.factor:
            return FOREVER
        return max(self.least, self.factor * expected / speed) + output / speed


class FirstByteDeadline:
    """Bounds what is done inside its context. After `wall_seconds`, or when it is `expired`, `give_up` is asked whether to leave
    the engine after so many wall seconds: if so the context ends with EngineFailedError; if not the wait goes on, and it is
    asked again each `wall_seconds`. Time in which this process stood still is given back: what the engine said meanwhile has
    not been read yet."""

    def __init__(self, wall_seconds: Seconds, give_up: Callable[[Seconds], bool]) -> None:
        self._wall_seconds = wall_seconds
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = asyncio.timeout(None)
        self._began = self._loop.time()

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._wait(self._wall_seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            raise no_first_byte(self._loop.time() - self._began) from timeout

    def expire(self) -> None:
        """It is known that the engine has not got the request any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._overdue()

    def _wait(self, wall_seconds: Seconds) -> None:
        if wall_seconds < FOREVER:
            due = self._loop.time() + wall_seconds
            self._timer = self._loop.call_at(due, self._look, due)

    def _look(self, due: Seconds) -> None:
        late = self._loop.time() - due
        if late > STOOD_STILL_WALL_SECONDS:
            self._wait(late)
        else:
            self._overdue()

    def _overdue(self) -> None:
        if self._give_up(self._loop.time() - self._began):
            self._timeout.reschedule(self._loop.time())
        else:
            self._wait(self._wall_seconds)


def no_first_byte(wall_seconds: Seconds) -> EngineFailedError:
    """The engine was too slow to begin."""
    return EngineFailedError(f"it sent nothing for {wall_seconds:.3g} s", failure="first_byte_timeout")
