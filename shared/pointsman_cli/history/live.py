"""Reads a fleet's log from JetStream, up to its end at opening time. The event loop runs only to fetch a batch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import TypeVar

from typing_extensions import override

from pointsman.contracts.commands import FleetDescribed
from pointsman.ports import (
    CheckpointLabel,
    Checkpoints,
    ForbiddenError,
    Link,
    LogEntry,
    LogExtent,
    LogMissingError,
    LogReset,
    LogUnavailableError,
    StoreUnavailableError,
)
from pointsman.primitives import Sequence
from pointsman.runtime.settings import FleetSettings
from pointsman.simulation.replay import BaseState
from pointsman_cli.command_client import NoAnswerError, connected_link, described
from pointsman_cli.event_loop import command_runner
from pointsman_cli.history.checkpoint import ExportedCheckpoint, proven
from pointsman_cli.history.entries import Header, History, HistoryError

T = TypeVar("T")

BATCH_ENTRIES = 1000
SAFE_SHARE = 0.02
"""Checkpoints of this first share of the entries may be dropped while in use."""
SILENCE_SECONDS_MAX = 10.0


class LiveHistory(History):
    """Raises HistoryError."""

    is_seekable = True

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.origin = f"the log of pool '{settings.pool}' at {settings.nats_shown}"
        with command_runner() as runner:
            self.extent = extent = runner.run(self._measured())
        self.header = Header(
            pool=settings.pool,
            identity=extent.identity,
            first=extent.first,
            last=extent.last,
            entries=extent.entries,
        )

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        header = self.header
        if not header.entries:
            return
        for batch in self._read_in_loop(_batches(self._settings, self.origin, start, header)):
            yield from batch

    @override
    @cached_property
    def known(self) -> BaseState | None:
        return None if self.header.first <= 1 else self._first_proven(self._fitting)

    @override
    @cached_property
    def fleet(self) -> FleetDescribed | None:
        """Not with the credentials of a console, which may ask nobody."""
        with command_runner() as runner:
            return runner.run(self._described())

    @override
    def known_before(self, sequence: Sequence) -> BaseState | None:
        def newest_first(labels: list[CheckpointLabel]) -> list[CheckpointLabel]:
            older = [label for label in self._fitting(labels) if label.as_of < sequence]
            return sorted(older, key=lambda label: -label.as_of)

        return self._first_proven(newest_first)

    def _first_proven(self, choose: Callable[[list[CheckpointLabel]], list[CheckpointLabel]]) -> BaseState | None:
        with command_runner() as runner:
            labels = runner.run(self._in_store(lambda store: store.labels()))
            for label in choose(labels):
                content = runner.run(self._in_store(lambda store, label=label: store.load(label)))  # type: ignore[misc]
                if content is None:
                    continue
                kept = ExportedCheckpoint(as_of=label.as_of, entry=label.entry, form=label.form, content=content)
                if (known := proven(self, kept)) is not None:
                    return known
        return None

    def _fitting(self, labels: list[CheckpointLabel]) -> list[CheckpointLabel]:
        """Oldest first; those that may be dropped soon last."""
        first, last = self.header.first, self.header.last
        safe = first + SAFE_SHARE * (last - first)
        found = [known for known in labels if known.identity == self.header.identity and first <= known.as_of <= last]
        return sorted(found, key=lambda label: (label.as_of < safe, label.as_of))

    async def _in_store(self, call: Callable[[Checkpoints], Awaitable[T]]) -> T:
        async with _linked(self._settings) as link:
            try:
                return await call(link.checkpoints)
            except StoreUnavailableError as error:
                raise HistoryError(f"the checkpoints of {self.origin} cannot be read: {error}") from error

    async def _described(self) -> FleetDescribed | None:
        async with _linked(self._settings) as link:
            try:
                return await described(link.commands, self._settings)
            except NoAnswerError as error:
                if not isinstance(error.__cause__, ForbiddenError):
                    self.unanswered = error.message
                return None

    async def _measured(self) -> LogExtent:
        async with _linked(self._settings) as link:
            try:
                return await link.log.extent()
            except LogMissingError as error:
                raise HistoryError(
                    f"{self.origin} is not there; `pointsman fleet` shows which pool a running fleet serves"
                ) from error
            except LogUnavailableError as error:
                raise _no_log(self.origin, error) from error


async def _batches(
    settings: FleetSettings, origin: str, start: Sequence, header: Header
) -> AsyncGenerator[list[LogEntry], None]:
    """A full stream drops its head while it is read. A read from the head continues at what is left, unless the log was
    complete at opening: earlier reads saw the dropped entries."""
    async with _linked(settings) as link:
        following = max(start, header.first)
        reading = link.log.read(following)
        begun = start > header.first or header.first <= 1
        batch: list[LogEntry] = []
        while following <= header.last:
            entry = await _next(reading, origin)
            if isinstance(entry, LogReset):
                if begun or entry.first_sequence <= following:
                    raise HistoryError(
                        f"{origin} changed while it was read: {entry.reason}; read it again, or from the recorder's archive"
                    )
                following = entry.first_sequence
                continue
            begun = True
            if entry.sequence < following:
                continue
            batch.append(entry)
            following = entry.sequence + 1
            if len(batch) == BATCH_ENTRIES:
                yield batch
                batch = []
        if batch:
            yield batch


async def _next(reading: AsyncIterator[LogEntry | LogReset], origin: str) -> LogEntry | LogReset:
    try:
        async with asyncio.timeout(SILENCE_SECONDS_MAX):
            return await anext(reading)
    except (TimeoutError, LogUnavailableError) as error:
        raise _no_log(origin, error) from error


def _linked(settings: FleetSettings) -> AbstractAsyncContextManager[Link]:
    return connected_link(settings, name="history", error=HistoryError)


def _no_log(origin: str, error: Exception) -> HistoryError:
    reason = str(error) or f"no entry came within {SILENCE_SECONDS_MAX:g} s"
    return HistoryError(f"{origin} cannot be read: {reason}")
