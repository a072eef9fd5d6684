"""The State and how far it has read. The State is replaced when a fold restarts."""

import asyncio

from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.runtime.containment import DeadLetterWatch
from pointsman.runtime.recovery import RestoredState
from pointsman.state.state import State


class Replica:
    def __init__(self, state: State, pool: str) -> None:
        self.state = state
        self._end: Sequence | None = 0
        """None: where the fold starts is not known yet."""
        self._read = asyncio.Event()
        self._dead_letters = DeadLetterWatch(pool)

    @property
    def caught_up(self) -> bool:
        """Whether it has read all that the log held when the fold started."""
        return self._end is not None and self.state.sequence >= self._end

    def stop(self) -> None:
        """Until `restart`: the log does not continue the State."""
        self._end = None

    def restart(self, start: RestoredState) -> None:
        self.state = start.state
        self._end = start.end

    def apply(self, entry: LogEntry) -> None:
        self.state.apply_entry(entry)

    def pass_over(self, entry: LogEntry) -> None:
        """Count an entry that is applied already or does not decode."""
        self.state.skip(entry.sequence, subject=entry.subject, problem=entry.problem)

    def notify(self) -> None:
        self._dead_letters.look(self.state.dead_letters)
        self._read.set()

    async def reached(self, sequence: Sequence) -> None:
        while self.state.sequence < sequence:
            self._read.clear()
            await self._read.wait()
