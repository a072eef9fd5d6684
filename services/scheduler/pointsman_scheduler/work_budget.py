"""Bounds the CPU time of work that others may ask for without end, so that no decision waits for it."""

from pointsman.ports import Clock


class WorkBudget:
    """CPU seconds: `share` of the time that passes, `burst` at once. The last work may overdraw it."""

    def __init__(self, clock: Clock, *, burst: float) -> None:
        self._clock = clock
        self._burst = self._left = burst
        self._at = clock.wall()

    def wait_seconds(self, share: float) -> float:
        """Wall seconds until more work may begin."""
        now = self._clock.wall()
        self._left = min(self._burst, self._left + float(now - self._at) * share)
        self._at = now
        return max(0.0, -self._left / share)

    def spend(self, seconds: float) -> None:
        self._left -= seconds
