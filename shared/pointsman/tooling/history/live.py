"""The log of a running fleet, read from JetStream up to what is its end now.

Readers here are plain iterators, and the log's reader is asynchronous: each reading has an event loop of its own, which
runs while a batch is fetched and rests while the batch is folded. The adapter survives that: it reads by sequence.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_link import Link, open_link
from pointsman.chassis.settings import FleetSettings
from pointsman.ports import LogEntry, LogExtent, LogMissingError, LogReset, LogUnavailableError
from pointsman.primitives import Sequence
from pointsman.tooling.history.entries import Header, History
from pointsman.tooling.history.errors import HistoryError

CONNECT_SECONDS_MAX = 5.0
CONNECT_POLL_SECONDS = 0.05
BATCH_ENTRIES = 1000
SILENCE_SECONDS_MAX = 10.0
"""How long the next entry may take to come before the reading is given up."""


class LiveHistory(History):
    """The stream of one pool. Opening it looks once for its extent; raises HistoryError."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.origin = f"the log of pool '{settings.pool}' at {settings.nats}"
        with asyncio.Runner() as runner:
            extent = runner.run(self._extent())
        self.header = Header(
            pool=settings.pool,
            identity=extent.identity,
            first=extent.first,
            last=extent.last,
            entries=max(0, extent.last - extent.first + 1),
        )

    @override
    def entries(self, start: Sequence = 1) -> Iterator[LogEntry]:
        header = self.header
        if not header.entries:
            return
        with asyncio.Runner() as runner:
            batches = _batches(self._settings, self.origin, max(start, header.first), header.last)
            try:
                while batch := runner.run(anext(batches, [])):
                    yield from batch
            finally:
                runner.run(batches.aclose())

    async def _extent(self) -> LogExtent:
        async with AsyncExitStack() as stack:
            link = await _linked(stack, self._settings)
            try:
                return await link.log.extent()
            except (LogMissingError, LogUnavailableError) as error:
                raise _no_log(self.origin, error) from error


async def _batches(
    settings: FleetSettings, origin: str, first: Sequence, last: Sequence
) -> AsyncGenerator[list[LogEntry], None]:
    async with AsyncExitStack() as stack:
        link = await _linked(stack, settings)
        reading = link.log.read(first)
        batch: list[LogEntry] = []
        following = first
        while following <= last:
            entry = await _next(reading, origin)
            if entry.sequence < following:
                continue
            batch.append(entry)
            following = entry.sequence + 1
            if len(batch) == BATCH_ENTRIES:
                yield batch
                batch = []
        if batch:
            yield batch


async def _next(reading: AsyncIterator[LogEntry | LogReset], origin: str) -> LogEntry:
    try:
        async with asyncio.timeout(SILENCE_SECONDS_MAX):
            entry = await anext(reading)
    except (TimeoutError, LogMissingError, LogUnavailableError) as error:
        raise _no_log(origin, error) from error
    if isinstance(entry, LogReset):
        msg = f"{origin} changed while it was read: {entry.reason}; read it again, or from the recorder's archive"
        raise HistoryError(msg)
    return entry


async def _linked(stack: AsyncExitStack, settings: FleetSettings) -> Link:
    link = await stack.enter_async_context(
        open_link(settings, ScaledClock(settings.speed), HealthBoard(), name="history")
    )
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while not link.commands.connected:
        if time.monotonic() > deadline:
            msg = f"no nats-server answers at {settings.nats}; say where the log is with --from, --nats or --data"
            raise HistoryError(msg)
        await asyncio.sleep(CONNECT_POLL_SECONDS)
    return link


def _no_log(origin: str, error: Exception) -> HistoryError:
    reason = str(error) or f"it says nothing for {SILENCE_SECONDS_MAX:g} s"
    return HistoryError(f"{origin} cannot be read: {reason}")
