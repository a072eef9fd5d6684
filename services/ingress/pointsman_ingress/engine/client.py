"""HTTP client for engines, at permitted URLs only. Forwards only the headers listed here. Closing an unfinished answer
makes the engine abort it."""

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from types import SimpleNamespace
from typing import Self

import aiohttp
from yarl import URL

from pointsman.adapters.engine_connector import EngineConnector
from pointsman.adapters.name_resolver import NameResolver
from pointsman.adapters.shared_timers import SharedTimer, SharedTimers
from pointsman.adapters.waiting import wait_at_most
from pointsman.contracts.fleet import ANY_RANK
from pointsman.contracts.requests import AttemptFailure
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime import span_attributes
from pointsman.runtime.engine_keys import EngineKeys
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.telemetry import ENGINE_URLS_REFUSED
from pointsman.runtime.tracing import NO_SPAN, Span, trace_headers
from pointsman_ingress.engine.refusals import REFUSAL_BYTES_MAX, is_busy
from pointsman_ingress.engine.session import FIELD_BYTES_MAX, Answer, DirectSession
from pointsman_ingress.engine.streams import CHUNKS, StreamShape, StreamTail
from pointsman_ingress.http.errors import Header
from pointsman_ingress.http.request_headers import Headers

CONNECT_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
KEEP_ALIVE_WALL_SECONDS: WallSeconds = WallSeconds(4.0)  # less than uvicorn's five seconds
CUT_CHECK_WALL_SECONDS: WallSeconds = WallSeconds(5.0)  # aiohttp 3.14 may not end an invalid answer
AFTER_END_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
HOST_GONE_OPTIONS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
URLS_MAX = 10_000
PIECE_BYTES = 256 * 1024  # larger bodies are streamed, to not block the event loop
ANSWER_BYTES_MAX = 64 * 1024 * 1024
REPEATED_TIMES_MAX = 4
"""Times a body that a stream may repeat before its first output, and in its last event: two events of the Responses API have
parts of it, in which an escape may double a character. More is not held: an engine can send as much to each of its requests."""
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

KEY_HEADERS = ((b"authorization", "authorization"), (b"x-api-key", "x-api-key"))
RANK_HEADER = "x-data-parallel-rank"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
NOT_IMPLEMENTED = 501
TOO_MANY_REQUESTS = 429
SERVICE_UNAVAILABLE = 503  # a failure unless the engine says that it is busy
BUSY_RETRY_AFTER = "1"  # vLLM does not say when
_LACKS_API = re.compile(rb"does not support [^\"]{1,100} API\b")
UNFIT_STATUSES = (404, 408, 425, TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE)
KEY_STATUSES = (401, 403)
STREAM_FAILURE = "its stream said that it failed"
KEY_REFUSED = "it refused the key of the ingress: --engine-api-key must be the key that the engine requires"


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


@dataclass(slots=True)
class EngineRequest:
    instance: InstanceId
    url: str
    path: str
    body: bytes
    headers: Headers
    request_id: str
    dp_rank: int = ANY_RANK
    shape: StreamShape = CHUNKS
    content_type: str = JSON
    span: Span = NO_SPAN
    is_working: Callable[[], bool] = lambda: False
    """Whether the engine's silence within an answer is excused: it is known to compute."""


class EngineClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: EngineUrls,
        *,
        keys: EngineKeys,
        forward_authorization: bool,
        chunk_timeout_seconds: WallSeconds,
        direct: DirectSession | None = None,
    ) -> None:
        """`urls`: no other is opened. `direct`: for small bodies instead of `session`. `chunk_timeout_seconds`: maximum wall
        pause after the first output of an engine that is not known to work."""
        self._session = session
        self._direct = direct
        self._urls = urls
        self._timers = SharedTimers()
        self._pace = StreamPace()
        self.seconds = SharedTimer(1.0)
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._keys = keys
        self._clients_trusted = forward_authorization

    async def send(self, request: EngineRequest) -> "EngineAnswer":
        """Returns after the response head. Raises EngineFailedError unless the status is 200, 4xx, 501 or 503, of which
        `EngineAnswer.refusal` decides."""
        if not self._urls.cover(request.instance, request.url):
            ENGINE_URLS_REFUSED.inc()
            reason = self._urls.refusal(request.instance, request.url)
            raise EngineFailedError(reason, failure="connect_failure", public_reason="it cannot be reached")
        try:
            response = await self._post(request)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: invalid URL
            raise _failure(error) from error
        if request.span.recording:
            request.span.event("response_head")
            request.span.set({span_attributes.STATUS: response.status})
        if response.status not in (200, NOT_IMPLEMENTED, SERVICE_UNAVAILABLE) and not 400 <= response.status < 500:
            response.close()
            raise _bad_status(response.status)
        return EngineAnswer(
            response,
            request.shape,
            self._timers,
            partial(self._pace.rest, request.instance),
            chunk_timeout_seconds=self._chunk_timeout_seconds,
            is_working=request.is_working,
            repeated_bytes_max=REPEATED_TIMES_MAX * len(request.body),
        )

    async def _post(self, request: EngineRequest) -> Answer:
        url, headers = _url(request.url, request.path), self._headers(request)
        large = len(request.body) > PIECE_BYTES
        if self._direct is not None and not large:
            return await self._direct.post(url, request.body, headers)
        return await self._session.post(
            url,
            data=BytesIO(request.body) if large else request.body,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=request.span,
        )

    async def open(self, request: EngineRequest) -> tuple["EngineAnswer", bytes]:
        """`send`, then `EngineAnswer.opening`. Raises EngineFailedError."""
        answer = await self.send(request)
        try:
            first = await answer.opening()
            if answer.status == SERVICE_UNAVAILABLE:
                first = await answer.refusal(first)
        except BaseException:
            answer.close()
            raise
        request.span.event("first_byte")
        return answer, first

    async def ask(self, request: EngineRequest, *, bytes_max: int = ANSWER_BYTES_MAX) -> tuple[int, bytes]:
        """Status and body of the whole answer; of a refusal larger than REFUSAL_BYTES_MAX no body. Raises EngineFailedError."""
        async with await self.send(request) as answer:
            if answer.status < 400:
                return answer.status, await answer.whole(bytes_max=bytes_max)
            return answer.status, await answer.refusal()

    def is_unfit(self, status: int, instance: InstanceId, headers: Headers) -> bool:
        """Whether another engine may accept the request: this one refused our key, lacks the model or is overloaded."""
        key_of_client = self._forwards_keys(instance) and any(name in headers for name, _ in KEY_HEADERS)
        return status in UNFIT_STATUSES or (status in KEY_STATUSES and not key_of_client)

    def refused_own_key(self, status: int, instance: InstanceId) -> bool:
        """Whether an engine refused the operator's key, or none: no client could send one that helps."""
        return status in KEY_STATUSES and not self._forwards_keys(instance)

    def _forwards_keys(self, instance: InstanceId) -> bool:
        return self._clients_trusted and not self._keys.of(instance)

    def _headers(self, request: EngineRequest) -> dict[str, str]:
        headers = {"content-type": request.content_type, "x-request-id": request.request_id}
        if request.dp_rank != ANY_RANK:
            headers[RANK_HEADER] = str(request.dp_rank)
        if key := self._keys.of(request.instance):
            headers["authorization"] = f"Bearer {key}"
        elif self._clients_trusted:
            for name, sent_name in KEY_HEADERS:
                value = request.headers.get(name)
                if value is not None:
                    headers[sent_name] = value.decode("latin-1")
        traced = request.span.headers
        if not traced and self._clients_trusted:  # others would decide what the engines trace
            traced = trace_headers(request.headers)
        headers.update(traced)
        return headers


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
            raise _failure(error, head_received=True) from error
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
            raise _bad_status(self.status)
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


def lacks_endpoint(status: int, body: bytes) -> bool:
    """Whether the path is missing, not just the model. vLLM answers 501 also for parameters that it does not support."""
    if status == NOT_IMPLEMENTED:
        return _LACKS_API.search(body) is not None
    return status == 405 or (status == 404 and b'"Not Found"' in body)


def refusal_status(status: int) -> int:
    """As clients get it, which would send the same again after a 501."""
    return 400 if status == NOT_IMPLEMENTED else status


def open_session(*, traced: bool = False) -> aiohttp.ClientSession:
    """`traced`: spans note whether a connection had to be opened."""
    return aiohttp.ClientSession(
        trace_configs=[_connection_events()] if traced else None,
        connector=EngineConnector(
            limit=0,  # the server bounds clients (`open_files`), each of whom needs one
            keepalive_timeout=float(KEEP_ALIVE_WALL_SECONDS),
            ttl_dns_cache=60,
            resolver=NameResolver(),
            socket_factory=_socket,
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=float(CONNECT_WALL_SECONDS)),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept-encoding", "user-agent"),
        max_field_size=FIELD_BYTES_MAX,
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Notices within 11 s that the engine's host is gone, also while it owes an acknowledgement; one that hangs still answers."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in HOST_GONE_OPTIONS.items():
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _connection_events() -> aiohttp.TraceConfig:
    async def opened(_session: object, context: SimpleNamespace, _facts: object) -> None:
        context.trace_request_ctx.event("connection_opened")

    async def reused(_session: object, context: SimpleNamespace, _facts: object) -> None:
        context.trace_request_ctx.event("connection_reused")

    events = aiohttp.TraceConfig()
    events.on_connection_create_end.append(opened)
    events.on_connection_reuseconn.append(reused)
    return events


@lru_cache(URLS_MAX)  # parsing a URL costs as much as sending the request
def _url(engine: str, path: str) -> URL:
    return URL(engine.rstrip("/") + path)


def _header_text(sent: str, characters_max: int) -> str:
    """Empty unless it is safe to send on."""
    return sent if sent.isascii() and sent.isprintable() and len(sent) <= characters_max else ""


def _bad_status(status: int) -> EngineFailedError:
    return EngineFailedError(f"its status was {status}", failure="http_5xx", status=status)


def _failure(error: Exception, *, head_received: bool = False) -> EngineFailedError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not head_received and isinstance(error, aiohttp.ClientConnectorError | TimeoutError | ValueError):
        return EngineFailedError(reason, failure="connect_failure", public_reason="it cannot be reached")
    return EngineFailedError(reason, failure="stream_reset", public_reason="the connection broke off")
