"""What a long-running step does with an error that nobody expected, and how dead letters are told of.

A step that fails is counted and logged, and its loop goes on: an error that one log entry caused would come again after
every restart. A traceback of the same step is logged at most once in REPEAT_SECONDS.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from pointsman.chassis import telemetry
from pointsman.state.dead_letters import DeadLetters

log = structlog.get_logger()

REPEAT_SECONDS = 5.0
TOLD_AT_ONCE_MAX = 20
"""Dead letters that are logged one by one; beyond it, one line in REPEAT_SECONDS."""

_logged: dict[str, float] = {}


@contextmanager
def contained(step: str) -> Iterator[None]:
    """Ends with the error that ends its body, or with nothing. `step`: names it in log and metric."""
    try:
        yield
    except Exception:
        telemetry.STEPS_FAILED.labels(step).inc()
        now = time.monotonic()
        if now - _logged.get(step, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            _logged[step] = now
            log.exception("step_failed", step=step)


class DeadLetterWatch:
    """Logs and counts each dead letter of a fold once."""

    def __init__(self) -> None:
        self._letters: DeadLetters | None = None
        self._undecodable = 0
        self._unapplied = 0
        self._told = 0
        self._told_at = 0.0

    def look(self, letters: DeadLetters) -> None:
        """To be called after each entry. Another object is another fold: what it has at first was told before."""
        if letters is not self._letters:
            self._letters = letters
        elif (letters.undecodable, letters.unapplied) != (self._undecodable, self._unapplied):
            self._tell(letters)
        self._undecodable, self._unapplied = letters.undecodable, letters.unapplied

    def _tell(self, letters: DeadLetters) -> None:
        telemetry.DEAD_LETTERS.labels("undecodable").inc(letters.undecodable - self._undecodable)
        telemetry.DEAD_LETTERS.labels("unapplied").inc(letters.unapplied - self._unapplied)
        now = time.monotonic()
        if self._told >= TOLD_AT_ONCE_MAX and now - self._told_at < REPEAT_SECONDS:
            return
        self._told += 1
        self._told_at = now
        newest = letters.newest[-1]
        log.error(
            "dead_letter",
            sequence=newest.sequence,
            what=newest.what,
            reason=newest.reason,
            undecodable=letters.undecodable,
            unapplied=letters.unapplied,
        )
