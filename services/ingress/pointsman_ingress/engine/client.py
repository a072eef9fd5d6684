"""HTTP client for engines, at permitted URLs only. Forwards only the headers listed here. In: a request. Out: an answer of
which the head has come (`answer`)."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from types import SimpleNamespace

import aiohttp
from yarl import URL

from pointsman.adapters.engine_connector import EngineConnector
from pointsman.adapters.name_resolver import NameResolver
from pointsman.adapters.shared_timers import SharedTimer, SharedTimers
from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime import span_attributes
from pointsman.runtime.engine_keys import EngineKeys
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.telemetry import ENGINE_URLS_REFUSED
from pointsman.runtime.tracing import NO_SPAN, Span, trace_headers
from pointsman_ingress.engine.answer import (
    ANSWER_BYTES_MAX,
    EngineAnswer,
    EngineFailedError,
    StreamPace,
    bad_status,
    failure_of,
)
from pointsman_ingress.engine.refusals import NOT_IMPLEMENTED, SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS
from pointsman_ingress.engine.session import FIELD_BYTES_MAX, Answer, DirectSession
from pointsman_ingress.engine.streams import CHUNKS, StreamShape
from pointsman_ingress.http.call import JSON
from pointsman_ingress.http.request_headers import Headers

CONNECT_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
KEEP_ALIVE_WALL_SECONDS: WallSeconds = WallSeconds(4.0)  # less than uvicorn's five seconds
HOST_GONE_OPTIONS = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
URLS_MAX = 10_000
PIECE_BYTES = 256 * 1024  # larger bodies are streamed, to not block the event loop
REPEATED_TIMES_MAX = 4
"""Times a body that a stream may repeat before its first output, and in its last event: two events of the Responses API have
parts of it, in which an escape may double a character. More is not held: an engine can send as much to each of its requests."""

KEY_HEADERS = ((b"authorization", "authorization"), (b"x-api-key", "x-api-key"))
RANK_HEADER = "x-data-parallel-rank"
UNFIT_STATUSES = (404, 408, 425, TOO_MANY_REQUESTS, SERVICE_UNAVAILABLE)
KEY_STATUSES = (401, 403)
KEY_REFUSED = "it refused the key of the ingress: --engine-api-key must be the key that the engine requires"


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
            raise failure_of(error) from error
        if request.span.recording:
            request.span.event("response_head")
            request.span.set({span_attributes.STATUS: response.status})
        if response.status not in (200, NOT_IMPLEMENTED, SERVICE_UNAVAILABLE) and not 400 <= response.status < 500:
            response.close()
            raise bad_status(response.status)
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
