"""How long to wait before a process that has ended is started once more."""

from pointsman.primitives import Seconds

FIRST_RESTART_WAIT_SECONDS: Seconds = 0.5
RESTART_WAIT_SECONDS_MAX: Seconds = 30.0
RUNS_WELL_SECONDS: Seconds = 60.0
"""A process that ran so long since its last start is started again after the first, short wait."""


class Backoff:
    """Of one process, over all its lives. Wall seconds."""

    def __init__(self) -> None:
        self._wait: Seconds = 0.0
        self._started_at = float("-inf")

    def wait(self, now: float) -> Seconds:
        """Before it is started again, now that it has ended: each time twice as long, up to RESTART_WAIT_SECONDS_MAX, until it
        has run well."""
        ran_well = now - self._started_at >= RUNS_WELL_SECONDS
        self._wait = FIRST_RESTART_WAIT_SECONDS if ran_well else min(RESTART_WAIT_SECONDS_MAX, 2 * self._wait)
        self._started_at = now + self._wait
        return self._wait
