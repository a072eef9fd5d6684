"""The way to an engine: one pooled HTTP client, and one `EngineAnswer` for each request sent.

The body goes out as it came in and chunks come back as they are; the only thing read out of them is the usage at
their end. Headers are built anew: what the client sent reaches an engine only where it is named here, and the
other way round. Closing an answer before its end closes the connection, which is how an engine learns to stop.
"""

from collections import deque
from io import BytesIO
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import Seconds, Tokens
from pointsman_ingress.request_headers import Headers
from pointsman_ingress.streams import CHUNKS, StreamShape

KEEP_ALIVE_WALL_SECONDS: Seconds = 4.0
"""Engines behind uvicorn close an idle connection after five seconds; we must be the first to let go."""

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Largest answer that is kept whole in memory (not streamed)."""

PIECE_BYTES = 256 * 1024
"""Bodies up to here are sent in one piece."""

TAIL_CHUNKS = 4
"""Chunks at the end of a stream in which the usage is looked for."""

FORWARDED_HEADERS = ((b"traceparent", "traceparent"), (b"tracestate", "tracestate"))
EVENT_STREAM = "text/event-stream"
NOT_IMPLEMENTED = 501
RANK_HEADER = "x-data-parallel-rank"
"""By which vLLM is told which of its data-parallel ranks shall serve a request."""


class EngineFailedError(Exception):
    """The engine did not answer, answered with a server error, or broke off. `told` is what clients may hear of it: its
    address is none of their business."""

    def __init__(self, reason: str, *, told: str = "") -> None:
        super().__init__(reason)
        self.told = told or reason


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reports them; -1 where it does not say."""

    prompt_tokens: Tokens = -1
    completion_tokens: Tokens = -1
    cached_tokens: Tokens = -1


class EngineClient:
    """Sends requests to engines over kept-alive connections."""

    def __init__(self, session: aiohttp.ClientSession, *, api_key: str, forward_authorization: bool) -> None:
        """`api_key` is shown to the engines; without one the client's own key is passed on if
        `forward_authorization` says so (where it is not ours to check)."""
        self._session = session
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
    ) -> "EngineAnswer":
        """Send a request and wait for the head of the answer. `dp_rank`: which of the engine's data-parallel ranks is to
        serve it. `shape`: of the stream that comes, if one does. Raises EngineFailedError (not for 4xx, nor for 501, by
        which an engine says that it cannot do such a thing)."""
        try:
            url = self._urls.get((engine, path)) or self._remember_url(engine, path)
            response = await self._session.post(
                url, data=_payload(body), headers=self._headers(headers, request_id, dp_rank), allow_redirects=False
            )
        except (
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            ValueError,
        ) as error:  # ValueError: what it calls its URL is none
            raise _failure(error) from error
        if (response.status >= 500 and response.status != NOT_IMPLEMENTED) or 300 <= response.status < 400:
            response.close()
            msg = f"its status was {response.status}"
            raise EngineFailedError(msg)
        return EngineAnswer(response, shape)

    def _headers(self, headers: Headers, request_id: str, dp_rank: int) -> dict[str, str]:
        sent = {"content-type": "application/json", "x-request-id": request_id, **self._own_headers}
        if dp_rank != ANY_RANK:
            sent[RANK_HEADER] = str(dp_rank)
        for name, sent_name in FORWARDED_HEADERS:
            value = headers.get(name)
            if value is not None:
                sent[sent_name] = value.decode("latin-1")
        if self._forward_authorization:
            value = headers.get(b"authorization")
            if value is not None:
                sent["authorization"] = value.decode("latin-1")
        return sent

    def _remember_url(self, engine: str, path: str) -> URL:
        """Parsing a URL costs as much as sending the request; a fleet has few."""
        if len(self._urls) > 10_000:
            self._urls.clear()
        url = self._urls[engine, path] = URL(engine.rstrip("/") + path)
        return url


class EngineAnswer:
    """An answer whose head is here. Leaving its context before the end closes the connection."""

    def __init__(self, response: aiohttp.ClientResponse, shape: StreamShape) -> None:
        self._response = response
        self._shape = shape
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.streams = self.content_type.startswith(EVENT_STREAM)
        self._tail: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self._ended = False
        self.events = 0

    async def opening(self) -> bytes:
        """The first bytes, of a stream up to its first output: what an engine says before tells nothing of the prefill,
        and a client that has seen nothing can be served elsewhere. Raises as `chunk`."""
        opening = chunk = await self.chunk()
        while self.streams and chunk and not self._shape.shows_output(opening):
            chunk = await self.chunk()
            opening += chunk
        return opening

    async def chunk(self) -> bytes:
        """The next bytes, as they arrive; empty at the end. Raises EngineFailedError where it breaks off."""
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _failure(error) from error
        if chunk:
            self._tail.append(chunk)
            self._keep_last_event()
            self.events += chunk.count(b"data: ")
        else:
            self._end()
        return chunk

    async def whole(self, first: bytes = b"") -> bytes:
        """Everything, with what was read `first`. Raises EngineFailedError where it breaks off or is larger than 64 MiB."""
        chunks, size = [first], len(first)
        while chunk := await self.chunk():
            chunks.append(chunk)
            size += len(chunk)
            if size > ANSWER_BYTES_MAX:
                msg = f"its answer is larger than {ANSWER_BYTES_MAX} bytes"
                raise EngineFailedError(msg)
        return b"".join(chunks)

    def streamed_usage(self) -> Usage:
        """What the last events of the stream say; nothing unless the client asked for it."""
        for line in reversed(b"".join(self._tail).split(b"\n")):
            if line.startswith(b"data: {") and b'"usage"' in line:
                usage = usage_in(line[6:])
                if usage.completion_tokens >= 0:
                    return usage
        return Usage()

    @property
    def mid_event(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return bool(self._tail) and not self._tail[-1].endswith(b"\n\n")

    def _keep_last_event(self) -> None:
        """The last event may be as long as the whole answer: once it has begun, the tail keeps all of it."""
        if self._shape.output and self._tail.maxlen and self._shape.has_ended(b"".join(self._tail)):
            self._tail = deque(self._tail)

    def _end(self) -> None:
        if self.streams and self.status == 200 and not self._shape.has_ended(b"".join(self._tail)):
            msg = f"its stream ended without {self._shape.ends[0].decode().strip()}"
            raise EngineFailedError(msg)
        self._ended = True

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


def open_session(*, connections_max: int, connect_timeout: Seconds) -> aiohttp.ClientSession:
    """An HTTP client for engines. `connect_timeout`: wall seconds. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=connections_max, keepalive_timeout=KEEP_ALIVE_WALL_SECONDS, ttl_dns_cache=60
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept-encoding", "user-agent"),
    )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Under the names of chats and completions, or those of the Responses API."""

    prompt_tokens: int = -1
    completion_tokens: int = -1
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = -1
    output_tokens: int = -1
    input_tokens_details: _PromptDetails | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Response | None = None


_answers = msgspec.json.Decoder(_Answer)


def usage_in(answer: bytes) -> Usage:
    """The usage in an answer or an event of a stream; nothing where there is none or it cannot be read."""
    try:
        decoded = _answers.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Usage()
    usage = decoded.usage or (decoded.response.usage if decoded.response else None)
    if usage is None:
        return Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else None
    return Usage(
        max(usage.prompt_tokens, usage.input_tokens),
        max(usage.completion_tokens, usage.output_tokens),
        -1 if cached is None else cached,
    )


def _failure(error: Exception) -> EngineFailedError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    unreached = isinstance(error, aiohttp.ClientConnectorError | TimeoutError)
    return EngineFailedError(reason, told="it cannot be reached" if unreached else "the connection broke off")
