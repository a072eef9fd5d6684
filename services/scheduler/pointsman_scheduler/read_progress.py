"""Tells a leader that cannot read the log from one that reads slowly. In: looks at how far the log goes and how far it was
read. A server may describe the stream and store writes while it refuses a consumer (their number, memory, a right). Looks
are counted, not time: a process that stood still has not waited."""

from pointsman.primitives import Sequence, WallSeconds

LOOK_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
LOOKS_MAX = 6
"""Without progress. nats-server's own elections take up to 9 s, and no consumer is made meanwhile."""


class ReadProgress:
    def __init__(self) -> None:
        self._position: Sequence = -1
        self._looks = 0

    def look(self, position: Sequence, end: Sequence) -> str:
        """Returns why reading has stalled, or "". `position`: the last entry read; `end`: the last of the log."""
        waits = position < end and position == self._position
        self._looks = self._looks + 1 if waits else 0
        self._position = position
        return f"the log answers, but no entry after {position} can be read" if self._looks >= LOOKS_MAX else ""

    def forget(self) -> None:
        """The log does not answer, so nothing can be read."""
        self._looks = 0
