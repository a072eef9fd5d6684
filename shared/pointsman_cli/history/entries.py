"""A recorded log, independent of its storage."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import closing
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

import click
import msgspec

from pointsman.contracts.commands import FleetDescribed
from pointsman.contracts.decisions import Settings
from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import Name, Sequence
from pointsman.simulation.replay import BaseState
from pointsman.simulation.replay.folding import FoundSettings, found_pool_settings
from pointsman.state.state import PoolSettings
from pointsman_cli.event_loop import command_runner
from pointsman_cli.terminal import one_line

T = TypeVar("T")

SUBJECT_LENGTH_MAX = 1024
"""Of an entry in a file."""


class HistoryError(click.ClickException):
    """The log is missing or unreadable. Exit code 2, since 1 means that a difference was found."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class NotInLogError(HistoryError):
    """The log was read, and does not have what was asked for."""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`identity` is that of one unbroken log; numbers are 0 if unknown."""

    pool: Name = ""
    identity: Name = ""
    first: Sequence = 0
    last: Sequence = 0
    entries: int = 0
    pool_settings: Settings = {}
    pointsman: Name = ""


class History(ABC):
    """A re-readable log. Reading raises HistoryError."""

    origin: str
    header: Header
    extent: LogExtent | None = None
    """Of a log that is still written."""
    is_seekable: bool = False
    """Whether reading from an entry on costs nothing for those before it."""
    holes: tuple[str, ...] = ()
    """Entries that its recorder did not get, and why."""
    others: str = ""
    """What else is where it was read from."""

    @property
    def begins(self) -> str:
        return f"the log begins at entry {max(1, self.header.first):,}"

    def __iter__(self) -> Iterator[LogEntry]:
        return self.entries()

    @cached_property
    def known(self) -> BaseState | None:
        return None

    @cached_property
    def settings(self) -> PoolSettings:
        return self.known.state.settings if self.known is not None else self._found.settings

    @cached_property
    def guesses_settings(self) -> bool:
        """Whether `settings` are a guess: no entry that is left names them."""
        return self.known is None and self._found.guessed

    @cached_property
    def _found(self) -> FoundSettings:
        with closing(self.entries()) as entries:
            return found_pool_settings(entries)

    @cached_property
    def fleet(self) -> FleetDescribed | None:
        """The leader's answer, of a running fleet whose leader answers."""
        return None

    unanswered: str = ""
    """Why no leader answered, once `fleet` was asked for."""

    def known_before(self, sequence: Sequence) -> BaseState | None:
        """A checkpoint of an entry before `sequence`, to fold less than the whole log."""
        known = self.known
        return known if known is not None and known.state.sequence < sequence else None

    @abstractmethod
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        """Entries from `start` to the end as of opening."""

    def close(self) -> None:
        """Ends what was left unread. The garbage collector, to which a traceback may leave it, comes too late: while
        another event loop runs, one cannot be closed."""
        for reading in list(self._in_loops):
            reading.close()

    @cached_property
    def _in_loops(self) -> WeakSet[Generator[list[Any], None, None]]:
        return WeakSet()

    def _read_in_loop(self, batches: AsyncGenerator[list[T], None]) -> Generator[list[T], None, None]:
        """Up to the first that is empty, in an event loop of its own."""
        reading = _in_loop(batches)
        self._in_loops.add(reading)
        return reading


def _in_loop(batches: AsyncGenerator[list[T], None]) -> Generator[list[T], None, None]:
    with command_runner() as runner:
        try:
            while batch := runner.run(anext(batches, [])):
                yield batch
        finally:
            runner.run(batches.aclose())
