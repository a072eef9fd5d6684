"""An engine's answer after its head: read, bounded and timed. Closing one that has not ended makes the engine abort it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self

import aiohttp

from pointsman.adapters.shared_timers import SharedTimers
from pointsman.adapters.waiting import wait_at_most
from pointsman.contracts.requests import AttemptFailure
from pointsman.primitives import InstanceId, WallSeconds
from pointsman_ingress.engine.refusals import REFUSAL_BYTES_MAX, SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS, is_busy
from pointsman_ingress.engine.session import FIELD_BYTES_MAX, Answer
from pointsman_ingress.engine.streams import StreamShape, StreamTail
from pointsman_ingress.http.call import JSON
from pointsman_ingress.http.errors import Header

CUT_CHECK_WALL_SECONDS: WallSeconds = WallSeconds(5.0)  # aiohttp 3.14 may not end an invalid answer
AFTER_END_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
ANSWER_BYTES_MAX = 64 * 1024 * 1024
OPENING_BYTES_MIN = 64 * 1024
OPENING_BYTES_MAX = 16 * 1024 * 1024
"""Buffered before the first output."""
HEAVY_BYTES_MIN = 4096
"""Reads of fewer bytes take two milliseconds at most."""
HEAVY_SECONDS = 0.01
"""CPU time for what one read of a stream brought: a read full of tokens (256 KiB) takes up to half of it, one full of line ends
five times as long."""
REST_TIMES = 10
"""So much longer than its heavy chunks took, an engine's streams rest together: one that floods gets a tenth of the event loop."""
CONTENT_TYPE_CHARACTERS_MAX = 200
RETRY_AFTER_CHARACTERS_MAX = 64
METADATA = "metadata"
"""Header of vLLM's embeddings as bytes: where each stands in the body, and their usage."""
EVENT_STREAM = "text/event-stream"
BUSY_RETRY_AFTER = "1"  # vLLM does not say when
STREAM_FAILURE = "its stream said that it failed"


class EngineFailedError(Exception):
    """`failure`: for the log; None for a 4xx. `status`: 0 without an answer. `public_reason`: without addresses."""

    def __init__(
        self, reason: str, *, failure: AttemptFailure | None = None, status: int = 0, public_reason: str = ""
    ) -> None:
        super().__init__(reason)
        self.failure = failure
        self.status = status
        self.public_reason = public_reason or reason


class AnswerTooLargeError(EngineFailedError):
    """No failure of the engine: another would answer the same."""


def bad_status(status: int) -> EngineFailedError:
    return EngineFailedError(f"its status was {status}", failure="http_5xx", status=status)


def failure_of(error: Exception, *, head_received: bool = False) -> EngineFailedError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not head_received and isinstance(error, aiohttp.ClientConnectorError | TimeoutError | ValueError):
        return EngineFailedError(reason, failure="connect_failure", public_reason="it cannot be reached")
    return EngineFailedError(reason, failure="stream_reset", public_reason="the connection broke off")


class StreamPace:
    """By engine, when its streams may go on, loop time."""

    def __init__(self) -> None:
        self._rests: dict[InstanceId, float] = {}

    async def rest(self, engine: InstanceId, cpu_seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        until = max(self._rests.get(engine, now), now) + REST_TIMES * cpu_seconds
        self._rests = {each: at for each, at in self._rests.items() if at > now} | {engine: until}
        await wait_at_most(asyncio.Event(), WallSeconds(until - now))


class EngineAnswer:
    """An answer after its head. Leaving the context before the end closes the connection."""

    def __init__(
        self,
        response: Answer,
        shape: StreamShape,
        timers: SharedTimers,
        rest: Callable[[float], Awaitable[None]],
        *,
        chunk_timeout_seconds: WallSeconds,
        is_working: Callable[[], bool],
        repeated_bytes_max: int,
    ) -> None:
        """`rest`: after so much CPU time. `repeated_bytes_max`: of the request, in a stream."""
        self._timers = timers
        self._rest = rest
        self.status = response.status
        self.content_type = _header_text(response.headers.get("content-type", ""), CONTENT_TYPE_CHARACTERS_MAX) or JSON
        self.streams = self.content_type.lower().startswith(EVENT_STREAM)
        self.tail = StreamTail(shape, repeated_bytes_max)
        self._repeated_bytes_max = repeated_bytes_max
        self._response = response
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._is_working = is_working
        self._opened = False  # the chunk timeout applies after the opening
        self._ended = False
        self._done = False
        self._comments_since: float | None = None  # loop time, while no event comes
        self._kept_open = False  # whether the engine keeps the connection open after the last event

    @property
    def metadata(self) -> str:
        """Of embeddings as bytes; empty if there is none."""
        return _header_text(self._response.headers.get(METADATA, ""), FIELD_BYTES_MAX)

    @property
    def retry_headers(self) -> list[Header]:
        """When the engine itself says that it may be asked again."""
        after = _header_text(self._response.headers.get("retry-after", ""), RETRY_AFTER_CHARACTERS_MAX)
        if self.status == SERVICE_UNAVAILABLE:
            after = after or BUSY_RETRY_AFTER
        elif self.status != TOO_MANY_REQUESTS:
            after = ""
        return [(b"retry-after", after.encode())] if after else []

    async def opening(self) -> bytes:
        """Returns the first bytes, of a stream up to the first output. Raises EngineFailedError."""
        bytes_max = min(OPENING_BYTES_MIN + self._repeated_bytes_max, OPENING_BYTES_MAX)
        chunk = await self.chunk()
        opening, size = [chunk], len(chunk)
        while self.streams and chunk and not self.tail.opening_is_over and size <= bytes_max:
            chunk = await self.chunk()
            opening.append(chunk)
            size += len(chunk)
        self._opened = True
        error = self.tail.error
        if error is not None and error.blames_engine and self.status < 400:
            raise EngineFailedError(STREAM_FAILURE, failure="http_5xx", status=self.status)
        return b"".join(opening)

    async def chunk(self) -> bytes:
        """The next bytes; empty at the end. Raises EngineFailedError."""
        try:
            chunk = await self._next()
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError, TimeoutError) as error:
            raise failure_of(error, head_received=True) from error
        if not chunk:
            self._end()
        elif self.streams:
            events = self.tail.events
            if len(chunk) < HEAVY_BYTES_MIN:
                self.tail.feed(chunk)
            else:
                await self._feed_timed(chunk)
            self._done = self.tail.is_over
            if self.tail.events > events:
                self._comments_since = None
            elif chunk.startswith(b":"):
                self._on_comment()
        return chunk

    async def _feed_timed(self, chunk: bytes) -> None:
        began = time.thread_time()
        self.tail.feed(chunk)
        spent = time.thread_time() - began
        if spent > HEAVY_SECONDS:
            await self._rest(spent)

    def _on_comment(self) -> None:
        """The engine's server lives, its model may hang. Raises EngineFailedError."""
        now = asyncio.get_running_loop().time()
        if self._comments_since is None:
            self._comments_since = now
        elif self._opened:
            self._check_chunk_timeout(WallSeconds(now - self._comments_since))

    def _check_chunk_timeout(self, waited: WallSeconds) -> None:
        """Hidden reasoning, and a tool call that is parsed whole, are silent for as long as they take."""
        if waited >= self._chunk_timeout_seconds and not self._is_working():
            raise EngineFailedError(f"it sent nothing more for {waited:.3g} s", failure="chunk_timeout")

    async def whole(
        self, first: bytes = b"", *, bytes_max: int = ANSWER_BYTES_MAX, take: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """All bytes, starting with `first`; `take` is told of them as they come. Raises EngineFailedError,
        AnswerTooLargeError if there are more than `bytes_max`, and what `take` raises."""
        chunks, size, chunk = list[bytes](), 0, first or await self.chunk()
        while chunk:
            size += len(chunk)
            if size > bytes_max:
                raise AnswerTooLargeError(f"its answer is larger than {bytes_max} bytes")
            take(len(chunk))
            chunks.append(chunk)
            chunk = await self.chunk()
        return b"".join(chunks)

    async def refusal(self, first: bytes = b"") -> bytes:
        """The body, starting with `first`; empty if it is larger than REFUSAL_BYTES_MAX. Raises EngineFailedError, also for a
        503 that does not say that the engine is busy."""
        try:
            body = await self.whole(first, bytes_max=REFUSAL_BYTES_MAX)
        except AnswerTooLargeError:
            body = b""
        if self.status == SERVICE_UNAVAILABLE and not is_busy(body):
            raise bad_status(self.status)
        return body

    def close(self) -> None:
        self._response.close()

    def _end(self) -> None:
        if self.streams and self.status == 200 and not self.tail.has_ended:
            msg = f"its stream ended without {self.tail.shape.ends[0].decode().strip()}"
            raise EngineFailedError(msg, failure="stream_reset")
        self._ended = not self._kept_open

    async def _next(self) -> bytes:
        if self._response.content.is_eof():  # all of it is there: no wait, no timeout
            return await self._response.content.readany()
        waited = WallSeconds(0.0)
        while True:
            wait = AFTER_END_WALL_SECONDS if self._done else CUT_CHECK_WALL_SECONDS
            if self._opened and waited < self._chunk_timeout_seconds:
                wait = min(wait, self._chunk_timeout_seconds - waited)
            limit = self._timers.of(float(wait)).limit()
            try:
                with limit:
                    return await self._response.content.readany()
            except TimeoutError:
                if not limit.fired:
                    raise
            if self._done:
                self._kept_open = True
                return b""
            connection = self._response.connection
            if connection is not None and connection.transport is None:
                raise ConnectionResetError("what came is no HTTP")
            waited += wait
            if self._opened:
                self._check_chunk_timeout(waited)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ended:
            self._response.release()
        else:
            self._response.close()


def _header_text(sent: str, characters_max: int) -> str:
    """Empty unless it is safe to send on."""
    return sent if sent.isascii() and sent.isprintable() and len(sent) <= characters_max else ""
