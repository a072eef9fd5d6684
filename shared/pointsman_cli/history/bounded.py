"""A recorded log up to a moment: to its readers, what comes behind it is not there."""

from collections.abc import Generator
from contextlib import closing
from functools import cached_property

import msgspec
from typing_extensions import override

from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.simulation.replay import BaseState
from pointsman.state.state import PoolSettings
from pointsman_cli.history.entries import History
from pointsman_cli.history.time_options import Moment, UpTo


class BoundedHistory(History):
    """Its header still names the log's last entry if `until` is a time."""

    def __init__(self, history: History, until: Moment) -> None:
        self._history = history
        self._until = until
        self.origin = history.origin
        last = history.header.last if until.sequence is None else until.sequence
        self.header = msgspec.structs.replace(history.header, last=last, entries=0)

    @property
    @override
    def begins(self) -> str:
        return self._history.begins

    @cached_property
    @override
    def known(self) -> BaseState | None:
        return self._unless_behind(self._history.known)

    @cached_property
    @override
    def settings(self) -> PoolSettings:
        return self._history.settings

    @cached_property
    @override
    def guesses_settings(self) -> bool:
        return self._history.guesses_settings

    @override
    def known_before(self, sequence: Sequence) -> BaseState | None:
        return self._unless_behind(self._history.known_before(sequence))

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        with closing(self._history.entries(start)) as entries:
            yield from UpTo(entries, self._until)

    def _unless_behind(self, known: BaseState | None) -> BaseState | None:
        return None if known is not None and self._until.is_behind(known.state, self._history) else known
