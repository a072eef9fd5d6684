"""Reads the whole log as a follower while it is written, and keeps it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pointsman.ports import Link, LogEntry, LogReset
from pointsman.state.state import PoolSettings, State
from pointsman_lab.background import background


@dataclass(slots=True)
class LogTail:
    """Every entry so far, and the State folded from them. `resets`: breaks in the log."""

    speed: float
    entries: list[LogEntry] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = State(PoolSettings(speed=self.speed))

    async def follow(self, link: Link) -> None:
        async for entry in link.log.read(1):
            if isinstance(entry, LogReset):
                self.resets.append(entry.reason)
                self.entries.clear()
                self.state = State(PoolSettings(speed=self.speed))
                continue
            self.entries.append(entry)
            self.state.apply_entry(entry)


@asynccontextmanager
async def followed(link: Link, speed: float) -> AsyncIterator[LogTail]:
    log_tail = LogTail(speed)
    async with background(log_tail.follow(link)):
        yield log_tail
