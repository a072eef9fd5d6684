"""A recorded log, whatever it is stored in."""

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
    """BaseState before the log is read. `identity` names one unbroken history; numbers are 0 if unknown."""

    pool: str = ""
    identity: str = ""
    first: Sequence = 0
    last: Sequence = 0
    entries: int = 0
    pool_settings: Settings = {}
    pointsman: str = ""
    """The version that exported it."""


class History(ABC):
    """One log, re-readable. Reading raises HistoryError. `origin` says in words where it is stored."""

    origin: str
    header: Header

    def __iter__(self) -> Iterator[LogEntry]:
        return self.entries()

    @cached_property
    def known(self) -> BaseState | None:
        """A checkpoint that replaces missing entries; None if none is missing or there is none."""
        return None

    @cached_property
    def settings(self) -> PoolSettings:
        return self.known.state.settings if self.known is not None else pool_settings(self)

    @abstractmethod
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        """From sequence `start` on, in order, up to the end as of opening."""
