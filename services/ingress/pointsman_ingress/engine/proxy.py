"""The way to an engine: one pooled HTTP client, and one `EngineAnswer` for each request sent.

The body goes out as it came in and chunks come back as they are; the only thing read out of them is the usage at
their end. Headers are built anew: what the client sent reaches an engine only where it is named here, and the
other way round. Closing an answer before its end closes the connection, which is how an engine learns to stop.
"""

import asyncio
import re
from io import BytesIO
from types import TracebackType
from typing import Annotated, Self

import aiohttp
import msgspec
from yarl import URL

from pointsman.contracts.fleet import ANY_RANK
from pointsman.contracts.requests import AttemptFailure
from pointsman.primitives import Seconds, Tokens
from pointsman_ingress.engine.streams import CHUNKS, EVENT_END, StreamShape, StreamTail, tells_failure
from pointsman_ingress.http.request_headers import Headers

KEEP_ALIVE_WALL_SECONDS: Seconds = 4.0
"""Engines behind uvicorn close an idle connection after five seconds; we must be the first to let go."""

CONNECTIONS_MAX = 4096
"""Open connections to engines, all together."""

CONNECT_WALL_SECONDS: Seconds = 2.0
"""Time to reach an engine before it counts as failed."""

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Largest answer that is kept whole in memory (not streamed)."""

PIECE_BYTES = 256 * 1024
"""Bodies up to here are sent in one piece."""

OPENING_BYTES_MAX = 16 * 1024 * 1024
"""How much of a stream is held back until there is output in it; then it passes as it comes."""

COUNT_MAX: Tokens = 1_000_000_000
"""No request has more tokens; an engine that tells of more tells nothing."""

CONTENT_TYPE_CHARACTERS_MAX = 200

CUT_CHECK_WALL_SECONDS: Seconds = 5.0
"""A connection that was closed for bytes which are no HTTP does not end the answer by itself (aiohttp 3.14): how often it is
looked after while nothing comes."""

CHUNK_WALL_SECONDS: Seconds = 60.0
"""Longest pause within an answer that has begun, unless settings say otherwise."""

TOLD_FAILURE = "its stream said that it failed"

EVENT_BYTES_MAX = 16 * 1024
"""An event that is longer does not say that the engine failed."""

AFTER_END_WALL_SECONDS: Seconds = 1.0
"""How long an engine may keep a stream open behind its last event."""
_done_event = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]\s*$")

FORWARDED_HEADERS = ((b"traceparent", "traceparent"), (b"tracestate", "tracestate"))
KEY_HEADERS = ((b"authorization", "authorization"), (b"x-api-key", "x-api-key"))
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
NOT_IMPLEMENTED = 501
UNFIT_STATUSES = (404, 408, 425, 429)
KEY_STATUSES = (401, 403)
RANK_HEADER = "x-data-parallel-rank"
"""By which vLLM is told which of its data-parallel ranks shall serve a request."""


class EngineFailedError(Exception):
    """The engine did not answer, answered with a server error, or broke off. `told` is what clients may hear of it: its
    address is none of their business. `failure` is what the log is told; None for a refusal (4xx), which is no failure of
    the engine. `status`: HTTP status of the answer; 0 where there was none."""

    def __init__(self, reason: str, *, failure: AttemptFailure | None = None, status: int = 0, told: str = "") -> None:
        super().__init__(reason)
        self.failure = failure
        self.status = status
        self.told = told or reason


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reports them; -1 where it does not say."""

    prompt_tokens: Tokens = -1
    completion_tokens: Tokens = -1
    cached_tokens: Tokens = -1


class EngineClient:
    """Sends requests to engines over kept-alive connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        api_key: str,
        forward_authorization: bool,
        chunk_wall_seconds: Seconds = CHUNK_WALL_SECONDS,
    ) -> None:
        """`api_key` is shown to the engines; without one the client's own key is passed on if
        `forward_authorization` says so (where it is not ours to check). `chunk_wall_seconds`: the longest pause within an
        answer that has begun."""
        self._session = session
        self._chunk_wall_seconds = chunk_wall_seconds
        self._own_headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._forward_authorization = forward_authorization and not api_key
        self._urls: dict[tuple[str, str], URL] = {}

    async def send(
        self,
        engine: str,
        path: str,
        body: bytes,
        headers: Headers,
        request_id: str,
        *,
        dp_rank: int = ANY_RANK,
        shape: StreamShape = CHUNKS,
        content_type: str = JSON,
    ) -> "EngineAnswer":
        """Send a request and wait for the head of the answer. `dp_rank`: which of the engine's data-parallel ranks is to
        serve it. `shape`: of the stream that comes, if one does. `content_type`: of the body. Raises EngineFailedError (not for 4xx, nor for 501, by
        which an engine says that it cannot do such a thing). Of other statuses only 200 is an answer."""
        try:
            url = self._urls.get((engine, path)) or self._remember_url(engine, path)
            told = {"content-type": content_type, **self._headers(headers, request_id, dp_rank)}
            response = await self._session.post(url, data=_payload(body), headers=told, allow_redirects=False)
        except (
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            ValueError,
        ) as error:  # ValueError: what it calls its URL is none
            raise _failure(error) from error
        if response.status not in (200, NOT_IMPLEMENTED) and not 400 <= response.status < 500:
            response.close()
            msg = f"its status was {response.status}"
            raise EngineFailedError(msg, failure="http_5xx", status=response.status)
        return EngineAnswer(response, shape, chunk_wall_seconds=self._chunk_wall_seconds)

    async def open(
        self,
        engine: str,
        path: str,
        body: bytes,
        headers: Headers,
        request_id: str,
        *,
        dp_rank: int = ANY_RANK,
        shape: StreamShape = CHUNKS,
        content_type: str = JSON,
    ) -> tuple["EngineAnswer", bytes]:
        """As `send`, and the answer's opening. Raises EngineFailedError."""
        answer = await self.send(
            engine, path, body, headers, request_id, dp_rank=dp_rank, shape=shape, content_type=content_type
        )
        try:
            return answer, await answer.opening()
        except BaseException:
            answer.close()
            raise

    def is_unfit(self, status: int, headers: Headers) -> bool:
        """Whether a refusal tells of the engine and not of the request, so that another may answer it: it does not take the
        key that it is shown (unless that is the client's own), does not know the model, or takes no more."""
        of_client = self._forward_authorization and any(name in headers for name, _ in KEY_HEADERS)
        return status in UNFIT_STATUSES or (status in KEY_STATUSES and not of_client)

    def _headers(self, headers: Headers, request_id: str, dp_rank: int) -> dict[str, str]:
        sent = {"x-request-id": request_id, **self._own_headers}
        if dp_rank != ANY_RANK:
            sent[RANK_HEADER] = str(dp_rank)
        for name, sent_name in FORWARDED_HEADERS:
            value = headers.get(name)
            if value is not None:
                sent[sent_name] = value.decode("latin-1")
        for name, sent_name in KEY_HEADERS if self._forward_authorization else ():
            value = headers.get(name)
            if value is not None:
                sent[sent_name] = value.decode("latin-1")
        return sent

    def _remember_url(self, engine: str, path: str) -> URL:
        """Parsing a URL costs as much as sending the request; a fleet has few."""
        if len(self._urls) > 10_000:
            self._urls.clear()
        url = self._urls[engine, path] = URL(engine.rstrip("/") + path)
        return url


class EngineAnswer:
    """An answer whose head is here. Leaving its context before the end closes the connection."""

    def __init__(
        self, response: aiohttp.ClientResponse, shape: StreamShape, *, chunk_wall_seconds: Seconds = CHUNK_WALL_SECONDS
    ) -> None:
        self._response = response
        self._shape = shape
        self._chunk_wall_seconds = chunk_wall_seconds
        self._begun = False
        """Whether the opening is here: only from then on are pauses bounded by the chunk timeout."""
        self.status = response.status
        self.content_type = _content_type(response.headers.get("content-type", ""))
        self.streams = self.content_type.lower().startswith(EVENT_STREAM)
        self._tail = StreamTail(shape)
        self._ended = False
        self._done = False
        """Whether what came last is the event by which streams of chunks end."""
        self._lingers = False
        """Whether the engine keeps the connection of a stream open that has ended."""
        self._event_begun = b""
        """What of an event is here that has not ended, up to EVENT_BYTES_MAX."""
        self.tells_failure = False
        """Whether the stream itself says that the engine failed, in an event of its own."""
        self.events = 0

    async def opening(self) -> bytes:
        """The first bytes, of a stream up to its first output: what an engine says before tells nothing of the prefill,
        and a client that has seen nothing can be served elsewhere. Raises as `chunk`, and where it says that it failed."""
        chunk = await self.chunk()
        opening, size = [chunk], len(chunk)
        while self.streams and chunk and not self._shows_output() and size <= OPENING_BYTES_MAX:
            chunk = await self.chunk()
            opening.append(chunk)
            size += len(chunk)
        self._begun = True
        if self.tells_failure and self.status < 400:
            raise EngineFailedError(TOLD_FAILURE, failure="http_5xx", status=self.status)
        return b"".join(opening)

    async def chunk(self) -> bytes:
        """The next bytes, as they arrive; empty at the end. Raises EngineFailedError where it breaks off."""
        try:
            chunk = await self._next()
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError, TimeoutError) as error:
            raise _failure(error, begun=True) from error
        if not chunk:
            self._end()
        elif self.streams:
            self._tail.feed(chunk)
            self.events += chunk.count(b"data:")
            self._look_for_failure(chunk)
            self._done = b"[DONE]" in chunk and _done_event.search(chunk) is not None
        return chunk

    def _shows_output(self) -> bool:
        """Whether there was output yet. The beginning of an event may be that of an error."""
        return self._tail.shows_output and not (self.events <= 1 and self._event_begun)

    def _look_for_failure(self, chunk: bytes) -> None:
        begun = self._event_begun
        if begun or b'"error"' in chunk or not chunk.endswith((b"\n\n", b"\r\n\r\n")):
            events = begun + chunk
            self.tells_failure = self.tells_failure or tells_failure(events)
            *_, rest = EVENT_END.split(events)
            self._event_begun = rest if len(rest) <= EVENT_BYTES_MAX else b""

    async def _next(self) -> bytes:
        """Raises what aiohttp does, ConnectionResetError, and EngineFailedError for too long a pause."""
        waited: Seconds = 0.0
        while True:
            wait = AFTER_END_WALL_SECONDS if self._done else CUT_CHECK_WALL_SECONDS
            if self._begun:
                wait = min(wait, self._chunk_wall_seconds - waited)
            patience = asyncio.timeout(wait)
            try:
                async with patience:
                    return await self._response.content.readany()
            except TimeoutError:
                if not patience.expired():
                    raise
            if self._done:
                self._lingers = True
                return b""
            connection = self._response.connection
            if connection is not None and connection.transport is None:
                msg = "what came is no HTTP"
                raise ConnectionResetError(msg)
            waited += wait
            if self._begun and waited >= self._chunk_wall_seconds:
                msg = f"it sent nothing more for {waited:g} s"
                raise EngineFailedError(msg, failure="chunk_timeout")

    async def whole(self, first: bytes = b"", *, bytes_max: int = ANSWER_BYTES_MAX) -> bytes:
        """Everything, with what was read `first`. Raises EngineFailedError where it breaks off or is larger."""
        chunks, size = [first], len(first)
        while chunk := await self.chunk():
            chunks.append(chunk)
            size += len(chunk)
            if size > bytes_max:
                msg = f"its answer is larger than {bytes_max} bytes"
                raise EngineFailedError(msg, failure="stream_reset")
        return b"".join(chunks)

    def streamed_usage(self) -> Usage:
        """What the last events of the stream say; nothing unless the client asked for it."""
        for said in self._tail.data_backwards():
            if b'"usage"' in said:
                usage = usage_in(said)
                if usage.completion_tokens >= 0:
                    return usage
        return Usage()

    @property
    def mid_event(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return self._tail.mid_event

    def close(self) -> None:
        """Close the connection, which tells the engine to stop."""
        self._response.close()

    def _end(self) -> None:
        if self.streams and self.status == 200 and not self._tail.has_ended:
            msg = f"its stream ended without {self._shape.ends[0].decode().strip()}"
            raise EngineFailedError(msg, failure="stream_reset")
        self._ended = not self._lingers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ended:
            self._response.release()
        else:
            self._response.close()


def lacks_endpoint(status: int, body: bytes) -> bool:
    """Whether the engine says that it has no such path, and not, for instance, no such model."""
    return status in (405, NOT_IMPLEMENTED) or (status == 404 and b'"Not Found"' in body)


def _payload(body: bytes) -> bytes | BytesIO:
    """A large body is sent piece by piece, so that it does not hold up others."""
    return body if len(body) <= PIECE_BYTES else BytesIO(body)


def open_session() -> aiohttp.ClientSession:
    """An HTTP client for engines. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, keepalive_timeout=KEEP_ALIVE_WALL_SECONDS, ttl_dns_cache=60
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WALL_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept-encoding", "user-agent"),
    )


_Count = Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """Under the names of chats and completions, those of the Responses API, or Anthropic's, whose `input_tokens` are those
    that the cache had nothing to do with."""

    prompt_tokens: _Count = -1
    completion_tokens: _Count = -1
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: _Count = -1
    output_tokens: _Count = -1
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    @property
    def whole_prompt(self) -> Tokens:
        beside = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return max(self.prompt_tokens, self.input_tokens + beside if self.input_tokens >= 0 else -1)

    @property
    def cached(self) -> Tokens:
        """-1 where it is not said."""
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else self.cache_read_input_tokens
        return -1 if cached is None else cached


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Response | None = None


_answers = msgspec.json.Decoder(_Answer)


def usage_in(answer: bytes) -> Usage:
    """The usage in an answer or an event of a stream; nothing where there is none, or where it cannot be read or be true."""
    try:
        decoded = _answers.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Usage()
    usage = decoded.usage or (decoded.response.usage if decoded.response else None)
    if usage is None:
        return Usage()
    return Usage(usage.whole_prompt, max(usage.completion_tokens, usage.output_tokens), usage.cached)


def _content_type(said: str) -> str:
    """What clients are told; what cannot be a header of ours is not."""
    sound = said.isascii() and said.isprintable() and 0 < len(said) <= CONTENT_TYPE_CHARACTERS_MAX
    return said if sound else JSON


def _failure(error: Exception, *, begun: bool = False) -> EngineFailedError:
    """`begun`: whether the head of the answer was here."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    unreached = not begun and isinstance(error, aiohttp.ClientConnectorError | TimeoutError | ValueError)
    if unreached:
        return EngineFailedError(reason, failure="connect_failure", told="it cannot be reached")
    return EngineFailedError(reason, failure="stream_reset", told="the connection broke off")
