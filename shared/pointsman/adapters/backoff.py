"""Exponential backoff between attempts, with jitter so that processes that failed together do not retry together."""

import random

from pointsman.primitives import WallSeconds

JITTER = 0.25
RETRY_SECONDS_MIN: WallSeconds = WallSeconds(0.1)
RETRY_SECONDS_MAX: WallSeconds = WallSeconds(1.0)
FIRST_RESTART_WAIT_SECONDS: float = 0.5
RESTART_WAIT_SECONDS_MAX: float = 30.0
RUNS_WELL_SECONDS: float = 60.0
"""A process that ran this long restarts after the first wait again."""

chance = random.Random()


class Backoff:
    __slots__ = ("_first", "_longest", "attempts")

    def __init__(
        self, first_seconds: WallSeconds = RETRY_SECONDS_MIN, longest_seconds: WallSeconds = RETRY_SECONDS_MAX
    ) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self.attempts = 0

    def next_wait(self) -> WallSeconds:
        wait = min(self._longest, self._first * 2.0 ** min(self.attempts, 60))
        self.attempts += 1
        return wait * (1.0 - JITTER * chance.random())

    def reset(self) -> None:
        self.attempts = 0


class RestartBackoff:
    def __init__(self) -> None:
        self._wait: float = 0.0
        self._started_at = float("-inf")

    def wait(self, now: float) -> float:
        """Doubles up to RESTART_WAIT_SECONDS_MAX until the process has run for RUNS_WELL_SECONDS. No jitter."""
        ran_well = now - self._started_at >= RUNS_WELL_SECONDS
        self._wait = FIRST_RESTART_WAIT_SECONDS if ran_well else min(RESTART_WAIT_SECONDS_MAX, 2 * self._wait)
        self._started_at = now + self._wait
        return self._wait
