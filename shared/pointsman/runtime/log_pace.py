"""Bounds what others can make us log: lines of one event a second, and characters of a value."""

import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

BURST_MAX = 200
LINES_A_SECOND = 20.0
VALUE_CHARACTERS_MAX = 500
NEVER_DROPPED = frozenset({"admin_action"})


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float
    suppressed: int = 0


class LogPace:
    """A structlog processor. The next line of an event says how many were `suppressed`. The names of events are ours,
    so the table is bounded."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def __call__(self, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Raises DropEvent."""
        now, event = time.monotonic(), str(line.get("event"))
        bucket = self._buckets.setdefault(event, _Bucket(BURST_MAX, now))
        bucket.left = min(BURST_MAX, bucket.left + (now - bucket.at) * LINES_A_SECOND)
        bucket.at = now
        if bucket.left < 1 and event not in NEVER_DROPPED:
            bucket.suppressed += 1
            raise structlog.DropEvent
        bucket.left -= 1
        if bucket.suppressed:
            line["suppressed"], bucket.suppressed = bucket.suppressed, 0
        for name, value in line.items():
            if isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
                line[name] = value[:VALUE_CHARACTERS_MAX] + "..."
        return line
