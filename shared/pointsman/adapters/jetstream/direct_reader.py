"""Reads the stream by batched direct gets, for people: unlike a consumer a get needs no right to make anything, and leaves
nothing on the server. Each batch begins with the last entry read, which must be the same one (by time stamp) or dropped by
retention; new entries are polled for."""

import asyncio
import json
from collections import deque
from collections.abc import Callable

from typing_extensions import override

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.jetstream.connection import (
    NO_RESPONDERS,
    Connection,
    Message,
    NotConnectedError,
    Subscription,
    status_of,
)
from pointsman.adapters.jetstream.stream import Stream
from pointsman.adapters.jetstream.stream_reader import StreamReader
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.subjects import SUBJECT_ROOT
from pointsman.ports import LogEntry, LogReset, LogUnavailableError
from pointsman.primitives import PoolName, Seconds, Sequence

BATCH_MESSAGES = 1000
BATCH_BYTES = 16 * 1024**2
BATCH_SECONDS_MAX: Seconds = 2.0
POLL_SECONDS: Seconds = 0.2
SEQUENCE_HEADER = "Nats-Sequence"
SUBJECT_HEADER = "Nats-Subject"
STAMP_HEADER = "Nats-Time-Stamp"


class DirectReader(StreamReader):
    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        pool: PoolName,
        listener: LogListener,
        start: Sequence,
        kinds: tuple[str, ...],
        at_end: Callable[[], None],
    ) -> None:
        super().__init__(connection, stream, listener, at_end)
        self._wanted = tuple(f"{SUBJECT_ROOT}.{pool}.{kind}" for kind in kinds)
        self._position = start - 1
        self._stamp = ""
        self._hole_at: Sequence | None = None
        self._found: deque[Message] = deque()
        self._batch: list[Message] = []
        self._batch_ended: asyncio.Future[None] | None = None
        self._batches = 0
        self._inbox = f"{stream.new_inbox()}."
        self._subscription: Subscription | None = None
        self._backoff = Backoff()

    @override
    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    @override
    async def _step(self) -> LogEntry | LogReset | None:
        if self._found:
            return await self._take(self._found.popleft())
        try:
            batch = await self._get()
            if not batch:
                return await self._nothing_found()
        except (LogUnavailableError, NotConnectedError, TimeoutError) as error:
            reason = str(error) or f"no answer within {BATCH_SECONDS_MAX:g} s"
            self._listener.trouble("reading waits", reason)
            await asyncio.sleep(float(self._backoff.next_wait()))
            return None
        self._backoff.reset()
        self._found.extend(batch)
        if len(batch) == 1 and _sequence(batch[0]) == self._position:
            self._at_end()
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _take(self, message: Message) -> LogEntry | LogReset | None:
        headers = message.headers or {}
        sequence, stamp = _sequence(message), headers.get(STAMP_HEADER, "")
        if sequence == self._position:
            if stamp == self._stamp or not self._stamp:
                self._stamp = stamp
                return None
            return await self._restart(f"the log went on differently before entry {sequence}")
        if sequence != self._position + 1:
            return await self._hole(sequence)
        self._position, self._stamp = sequence, stamp
        subject = headers.get(SUBJECT_HEADER, "")
        if self._wanted and not any(subject == kind or subject.startswith(f"{kind}.") for kind in self._wanted):
            return None
        return self._entry(sequence, subject, message.data)

    async def _hole(self, sequence: Sequence) -> LogReset | None:
        """Read again once: messages may have been lost on the way."""
        self._found.clear()
        if self._hole_at == self._position or self._position == 0:
            return await self._restart(
                f"entries {self._position + 1} to {sequence - 1} were dropped before they were read"
            )
        self._hole_at = self._position
        return None

    async def _restart(self, reason: str) -> LogReset | None:
        try:
            extent = await self._stream.extent()
        except LogUnavailableError as error:
            self._listener.trouble("reading waits", str(error))
            self._found.clear()
            await asyncio.sleep(float(self._backoff.next_wait()))
            return None
        self._found.clear()
        self._position, self._stamp, self._hole_at = extent.first - 1, "", None
        return LogReset(extent.first, reason)

    async def _nothing_found(self) -> LogReset | None:
        """There is no entry from our position on. Raises LogUnavailableError."""
        self._stream.saw(self._position)
        extent = await self._stream.extent()
        if extent.last < self._position:
            return await self._restart(f"the log ends at {extent.last}, but {self._position} was read")
        self._at_end()
        await asyncio.sleep(POLL_SECONDS)
        return None

    async def _get(self) -> list[Message]:
        """Raises NotConnectedError, LogUnavailableError, TimeoutError."""
        if self._subscription is None:
            self._subscription = await self._connection.subscribe(self._inbox + "*", self._on_message)
        self._batches += 1
        self._batch = []
        self._batch_ended = asyncio.get_running_loop().create_future()
        query = {"seq": max(1, self._position), "batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES}
        self._connection.publish(
            self._stream.direct_subject, json.dumps(query).encode(), reply=f"{self._inbox}{self._batches}"
        )
        async with asyncio.timeout(BATCH_SECONDS_MAX):
            await self._batch_ended
        return self._batch

    def _on_message(self, message: Message) -> None:
        if message.subject != f"{self._inbox}{self._batches}" or self._batch_ended is None:
            return
        if SEQUENCE_HEADER in (message.headers or {}):
            if len(self._batch) <= BATCH_MESSAGES:
                self._batch.append(message)
        elif self._batch_ended.done():
            return
        elif status_of(message) == NO_RESPONDERS:
            self._batch_ended.set_exception(LogUnavailableError("the log answers no direct gets"))
        elif status_of(message):
            self._batch_ended.set_result(None)


def _sequence(message: Message) -> Sequence:
    return int((message.headers or {}).get(SEQUENCE_HEADER, "0"))
