"""A recorded log as one thing, whatever it is kept in."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from functools import cached_property

import msgspec

from pointsman.contracts.decisions import Settings
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.simulation.replay import BaseState, pool_settings
from pointsman.state.state import PoolSettings


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a log before it is read. `identity` names one unbroken history; numbers are 0 where unknown."""

    pool: str = ""
    identity: str = ""
    first: Sequence = 0
    last: Sequence = 0
    entries: int = 0
    pool_settings: Settings = {}
    pointsman: str = ""
    """The version that exported it."""


class History(ABC):
    """One log, read from its start as often as wanted. Reading raises HistoryError.

    `origin` says in words where it is kept.
    """

    origin: str
    header: Header

    def __iter__(self) -> Iterator[LogEntry]:
        return self.entries()

    @cached_property
    def known(self) -> BaseState | None:
        """What is known of entries that the log has no more, as of one that it still has or has just lost; None where it
        has all, or where nothing is known."""
        return None

    @cached_property
    def settings(self) -> PoolSettings:
        """What the fold of this log is told."""
        return self.known.state.settings if self.known is not None else pool_settings(self)

    @abstractmethod
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        """Everything from sequence `start` on, in order, up to what was the end when the log was opened."""
