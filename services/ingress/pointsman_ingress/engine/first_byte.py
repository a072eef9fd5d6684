"""Deadline for an engine's first byte: a multiple of the predicted TTFT, plus the output at the TPOT SLO if not
streamed."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from pointsman.adapters.shared_timers import Interruption, SharedTimer
from pointsman.primitives import EngineSeconds, Seconds, WallSeconds
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.settings import IngressSettings

FOREVER: Seconds = math.inf

STALL_WALL_SECONDS: WallSeconds = WallSeconds(0.25)  # a timer this late means that the process stalled, not the engine
POSTPONED_MAX = 8  # then the engine is judged, however late the timers are


def first_byte_wall_seconds(
    settings: IngressSettings, expected: EngineSeconds = 0.0, *, output: EngineSeconds = 0.0, speed: float = 1.0
) -> Seconds:
    """`expected`: engine seconds to the first token; `output`: engine seconds from there to the first byte."""
    if not settings.first_byte_factor:
        return FOREVER
    return max(float(settings.first_byte_seconds_min), settings.first_byte_factor * expected / speed) + output / speed


class FirstByteDeadline:
    """After `wall_seconds` or `expire` calls `give_up(waited_seconds)`: True raises EngineFailedError, False restarts
    the wait. Does not count time during which this process stalled, up to POSTPONED_MAX times. `least`: wall seconds before
    which `expire` does nothing. `seconds`: by which longer waits are counted, so that few have a timer of their own."""

    def __init__(
        self,
        wall_seconds: Seconds,
        give_up: Callable[[Seconds], bool],
        seconds: SharedTimer,
        *,
        least: WallSeconds = WallSeconds(0.0),
    ) -> None:
        self._wall_seconds = wall_seconds
        self._least = float(least)
        self._give_up = give_up
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._postponed = 0
        self._interruption = Interruption()
        self._began = self._loop.time()

    def __enter__(self) -> None:
        self._interruption.__enter__()
        self._wait(self._wall_seconds)

    def __exit__(self, *raised: Any) -> None:
        self._stop()
        try:
            self._interruption.__exit__(*raised)
        except TimeoutError as timeout:
            reason = f"it sent nothing for {self._loop.time() - self._began:.3g} s"
            raise EngineFailedError(reason, failure="first_byte_timeout") from timeout

    def expire(self) -> None:
        if self._loop.time() - self._began >= self._least:
            self._stop()
            self._decide()

    def _stop(self) -> None:
        self._seconds.cancel(self._number)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, wall_seconds: Seconds) -> None:
        if wall_seconds < FOREVER:
            self._wait_until(self._loop.time() + wall_seconds)

    def _wait_until(self, due: Seconds) -> None:
        if due - self._loop.time() > self._seconds.length:
            self._number = self._seconds.set(partial(self._wait_until, due))
        else:
            self._timer = self._loop.call_at(due, self._on_timer, due)

    def _on_timer(self, due: Seconds) -> None:
        late = self._loop.time() - due
        if WallSeconds(late) > STALL_WALL_SECONDS and self._postponed < POSTPONED_MAX:
            self._postponed += 1
            self._wait(late)
        else:
            self._decide()

    def _decide(self) -> None:
        if self._give_up(self._loop.time() - self._began):
            self._interruption.fire()
        else:
            self._wait(self._wall_seconds)
