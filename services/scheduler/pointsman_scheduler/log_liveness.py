"""Tells silent instances from a silent log. Workers that get no answer to their heartbeats report through the log; while it
does not take entries, connections stay up, and suspecting all workers would reject all requests. Signs: our own decision
does not come back, or several instances fall silent together, in the log and out of it; the second excuses them for a
bounded time only."""

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, WallSeconds

QUIET_SHARE = 0.5
"""Share of the suspect time without any entry after which the log may be silent."""
DOUBT_SHARE = 3.0
"""Multiple of the suspect time for which several silent instances are excused."""


class LogLiveness:
    """Wall time; `listening_since` engine time."""

    def __init__(self, clock: Clock, *, suspect_seconds: WallSeconds) -> None:
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._last_entry_at = self._last_heartbeat_at = clock.wall()
        self._written = 0
        self._returned = 0
        self.listening_since: EngineSeconds = 0.0
        self.listening_since_wall = WallSeconds(0.0)

    def begin(self) -> None:
        self.listen_from_now()
        self._last_entry_at = self._last_heartbeat_at = self._clock.wall()
        self._written = self._returned = 0

    def listen_from_now(self) -> None:
        self.listening_since, self.listening_since_wall = self._clock.now(), self._clock.wall()

    def decision_written(self, number: int) -> None:
        self._written = number

    def entry_read(self, own_number: int = 0) -> None:
        self._last_entry_at = self._clock.wall()
        self._returned = max(self._returned, own_number)

    def heartbeat(self) -> None:
        self._last_heartbeat_at = self._clock.wall()

    def log_is_silent(self, instances: int) -> bool:
        now, patience = self._clock.wall(), self._suspect_seconds
        if now - self._last_entry_at < QUIET_SHARE * patience:
            return False
        quiet = now - max(self._last_entry_at, self._last_heartbeat_at)
        in_doubt = instances > 1 and QUIET_SHARE * patience <= quiet < DOUBT_SHARE * patience
        return in_doubt or self._returned < self._written
