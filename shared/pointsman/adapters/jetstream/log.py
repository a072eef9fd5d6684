"""A pool's log as a JetStream stream. Elections are compare-and-set."""

import asyncio
from collections.abc import AsyncIterator, Callable

from typing_extensions import override

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.jetstream.connection import Connection
from pointsman.adapters.jetstream.consumer import Reader
from pointsman.adapters.jetstream.direct_reader import DirectReader
from pointsman.adapters.jetstream.direct_stream import DirectStream, RevisionTakenError
from pointsman.adapters.jetstream.producer import WindowSettings, WriteWindow
from pointsman.adapters.jetstream.stream import Stream
from pointsman.adapters.jetstream.stream_reader import StreamReader
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.codec import LogEvent, UnwritableError, encode
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.subjects import subject_of
from pointsman.ports import (
    Clock,
    ElectionLostError,
    EventLog,
    Fence,
    LogEntry,
    LogExtent,
    LogReset,
    LogUnavailableError,
    OnStored,
    StoreUnavailableError,
    UnconfirmedWrites,
)
from pointsman.primitives import PoolName, Sequence, WallSeconds

APPEND_SECONDS_MAX = 4.0
"""Bound of one append; each try takes one second."""
STREAM_RETRY_SECONDS_MIN: WallSeconds = WallSeconds(0.1)
STREAM_RETRY_SECONDS_MAX: WallSeconds = WallSeconds(2.0)


class JetStreamLog(EventLog):
    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        elections: DirectStream,
        pool: PoolName,
        clock: Clock,
        listener: LogListener,
        name: str,
        window: WindowSettings,
        *,
        direct: bool = False,
        reads_every: WallSeconds = WallSeconds(0.0),
    ) -> None:
        """`direct`: read without a consumer. `reads_every`: new entries come in batches, this far apart."""
        self._connection = connection
        self._stream = stream
        self._direct = direct
        self._reads_every = reads_every
        self._elections = elections
        self._pool = pool
        self._listener = listener
        self._fence: Fence | None = None
        self._last_read: LogEntry | None = None
        self._stream_unverified = asyncio.Event()
        self._writes = WriteWindow(
            connection,
            pool,
            clock,
            listener,
            writer=name,
            settings=window,
            inbox=stream.new_inbox(),
            on_no_stream=self._stream_unverified.set,
            on_confirmed=stream.saw,
        )

    async def open(self) -> None:
        await self._writes.open()
        self._connection.on_change(self._on_change)

    def close(self) -> None:
        self._writes.close()

    @override
    async def append(self, event: LogEvent) -> Sequence:
        done: asyncio.Future[Sequence] = asyncio.get_running_loop().create_future()
        number = self._writes.put(event, done)
        try:
            async with asyncio.timeout(APPEND_SECONDS_MAX):
                return await done
        except TimeoutError as error:
            raise LogUnavailableError(f"the write was not confirmed within {APPEND_SECONDS_MAX:g} s") from error
        finally:
            if done.cancelled():
                self._writes.withdraw(number)

    @override
    def append_soon(self, event: LogEvent, fence: Fence | None = None, on_stored: OnStored | None = None) -> None:
        self._writes.put(event, fence=fence, on_stored=on_stored)

    @property
    @override
    def write_load(self) -> float:
        return self._writes.load

    @property
    @override
    def unconfirmed(self) -> UnconfirmedWrites:
        return self._writes.unconfirmed

    @override
    async def elect(self, event: LeaderElected, *, after: Sequence) -> Fence:
        try:
            elected = await self._elections.write_once(subject_of(self._pool, event), encode(event), after=after)
        except RevisionTakenError as error:
            raise ElectionLostError(str(error)) from error
        except (UnwritableError, StoreUnavailableError) as error:
            raise LogUnavailableError(str(error)) from error
        self._fence = Fence(elected)
        return self._fence

    @override
    async def flush(self, timeout: WallSeconds) -> bool:
        return await self._writes.flushed(float(timeout))

    @override
    async def extent(self) -> LogExtent:
        return await self._stream.extent()

    @override
    async def read(
        self, start: Sequence = 1, *, kinds: tuple[str, ...] = (), at_end: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LogEntry | LogReset]:
        reader = self._reader(start, kinds, at_end)
        try:
            while True:
                found = await reader.next()
                self._note_read(found)
                yield found
        finally:
            await reader.close()

    def _reader(self, start: Sequence, kinds: tuple[str, ...], at_end: Callable[[], None]) -> StreamReader:
        if self._direct:
            return DirectReader(self._connection, self._stream, self._pool, self._listener, start, kinds, at_end)
        every = float(self._reads_every)
        return Reader(self._connection, self._stream, self._listener, start, kinds, at_end, every)

    async def keep_stream(self) -> None:
        while True:
            await self._stream_unverified.wait()
            self._stream_unverified.clear()
            await self._ensure_stream()
            await asyncio.sleep(float(STREAM_RETRY_SECONDS_MIN))  # it may be described and not yet take a write

    async def _ensure_stream(self) -> None:
        backoff = Backoff(STREAM_RETRY_SECONDS_MIN, STREAM_RETRY_SECONDS_MAX)
        while self._connection.connected:
            try:
                extent, differences, replicas = await self._stream.ensure()
                if self._fence is not None and not self._fence.broken:
                    self._fence.broken = await self._lost()
            except (LogUnavailableError, StoreUnavailableError) as error:
                self._listener.log_missing(str(error))
                self._writes.resume()  # we may have the right to write and none to ask
                await asyncio.sleep(float(backoff.next_wait()))
                continue
            self._writes.server_fences = replicas == 1
            if differences:
                self._listener.trouble("stream settings differ, left alone", "; ".join(differences))
            self._listener.log_ready(extent.identity)
            self._writes.resume()
            return

    def _note_read(self, found: LogEntry | LogReset) -> None:
        if isinstance(found, LogReset):
            self._last_read = None
        elif self._last_read is None or found.sequence > self._last_read.sequence:
            self._last_read = found

    async def _lost(self) -> str:
        """Why what was read is no longer all in the log: a power cut took its last entries, and others may have got their
        sequences before the readers look. Raises LogUnavailableError, StoreUnavailableError."""
        read = self._last_read
        if read is None or read.sequence < (await self._stream.extent()).first:
            return ""
        stored = await self._elections.at(read.sequence)
        if stored is not None and stored.subject == read.subject and read.payload in (stored.payload, b""):
            return ""
        return f"the log has lost entry {read.sequence}, which was read"

    def _on_change(self, connected: bool) -> None:
        if connected:
            self._stream_unverified.set()
