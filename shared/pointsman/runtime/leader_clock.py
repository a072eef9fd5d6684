"""What the leader's clock shows: the time of the newest decision in the log, and what has passed here since it was read. Scaler
and rebalancer judge times by it, so that a wrong clock of their own neither resizes the pool nor moves requests. Limit: after a
start it may be behind until the leader decides something; until then requests look less late, and instances less idle."""

from collections.abc import Callable

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.envelope import is_fenced
from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, WallSeconds, engine_seconds
from pointsman.state.state import State


class LeaderClock:
    def __init__(self, clock: Clock, state: Callable[[], State]) -> None:
        self._clock = clock
        self._state = state
        self._read: tuple[EngineSeconds, WallSeconds] | None = None
        """Time of the newest decision, and when it was read."""

    def note(self, event: LogEvent) -> None:
        """After `state` has it."""
        if event.stamp is not None and not is_fenced(event.stamp, self._state().term):
            self._read = event.at, self._clock.wall()

    def now(self) -> EngineSeconds:
        if self._read is None:
            return min(self._clock.now(), self._state().last_at or float("inf"))
        at, read_at = self._read
        return at + engine_seconds(self._clock.wall() - read_at, self._clock.speed)
