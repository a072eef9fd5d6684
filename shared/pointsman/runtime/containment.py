"""Contains unexpected errors: counted, logged at a bounded rate. Reports dead letters likewise."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from pointsman.runtime import telemetry
from pointsman.runtime.telemetry import Step
from pointsman.state.dead_letters import DeadLetters

log = structlog.get_logger()

REPEAT_SECONDS = 5.0
LOG_BURST_MAX = 20


class RateLimit:
    """Of log lines: LOG_BURST_MAX at once, then one in REPEAT_SECONDS."""

    def __init__(self) -> None:
        self._logged = 0
        self._logged_at = 0.0

    def allows(self) -> bool:
        now = time.monotonic()
        if self._logged >= LOG_BURST_MAX and now - self._logged_at < REPEAT_SECONDS:
            return False
        self._logged += 1
        self._logged_at = now
        return True


_rate_limits: dict[str, RateLimit] = {}


@contextmanager
def contained(step: Step) -> Iterator[None]:
    """Suppresses exceptions of its body. `step` is its name in log and metric."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is counted and logged; the loop goes on
        note_failure(step, error)


def note_failure(step: Step, error: Exception, **fields: str) -> None:
    telemetry.UNEXPECTED_ERRORS.labels(step).inc()
    if _rate_limits.setdefault(step, RateLimit()).allows():
        log.error("unexpected_error", step=step, exc_info=error, **fields)


class DeadLetterWatch:
    """Reports each dead letter once: error if the fold failed, warning if the entry did not decode."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._letters: DeadLetters | None = None
        self._undecodable = 0
        self._unapplied = 0
        self._pace = RateLimit()

    def look(self, letters: DeadLetters) -> None:
        """Call after each entry. A new object is a new fold; its dead letters from a checkpoint are not reported."""
        if letters is not self._letters:
            self._letters = letters
            brought = letters.count > 1
            self._undecodable = letters.undecodable if brought else 0
            self._unapplied = letters.unapplied if brought else 0
        if letters.undecodable != self._undecodable or letters.unapplied != self._unapplied:
            self._tell(letters)
            self._undecodable, self._unapplied = letters.undecodable, letters.unapplied

    def _tell(self, letters: DeadLetters) -> None:
        telemetry.DEAD_LETTERS.labels(self._pool, "unapplied").inc(letters.unapplied - self._unapplied)
        if self._pace.allows():
            newest = letters.newest[-1]
            (log.error if newest.decoded else log.warning)(
                "dead_letter",
                sequence=newest.sequence,
                what=newest.what,
                reason=newest.reason,
                undecodable=letters.undecodable,
                unapplied=letters.unapplied,
            )
