"""uvicorn's HTTP/1.1 protocol (httptools) with bounds on heads, trailers and on slow and idle clients. llhttp rejects ambiguous
requests; the checks here are those it leaves to servers. Bodies are bounded by their readers."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, cast

import httptools
import structlog
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pointsman.primitives import Seconds
from pointsman.runtime.openai_errors import openai_error
from pointsman.runtime.telemetry import HTTP_CONNECTIONS_REFUSED, ConnectionRefusal

log = structlog.get_logger()

REFUSAL_LOG_WALL_SECONDS = 10.0
WHEN_GONE = "x-when-gone"
"""In an HTTP scope: `HttpProtocol.when_gone`."""
CLOSE_NOW = "x-close-now"
"""In an HTTP scope: `HttpProtocol.close_now`."""
HEAD = b"HTTP/1."
JOINED_BYTES_MAX = 64 * 1024
LARGE_READ_BYTES = 64 * 1024
UNREAD_REFUSAL_SECONDS: Seconds = 1.0
CHUNKS_A_READ = 512
CHUNK_REST_SECONDS: Seconds = 5e-6
"""Ten times what one takes, of any size. One read has up to 40,000, and the event loop makes 32 reads of a connection at a
time: almost a second."""
SWEEP_SECONDS_MIN: Seconds = 0.1


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Wall seconds."""

    head_bytes: int = 32 * 1024
    headers: int = 100
    head_seconds: Seconds = 10.0
    unread_seconds: Seconds = 5.0
    """Time to discard the rest of a request already answered."""
    send_seconds: Seconds = 60.0
    """Time without progress of a blocked write."""
    pipelined: int = 16
    pipelined_bytes: int = 64 * 1024
    connections: int = 16_384
    """Above it the longest idle connection is closed, else the one whose head has been incomplete for longest; if there
    is neither, the new one gets 503."""
    connections_per_address: int = 16_384
    """Above it the new one gets 503. Of IPv6 the first 64 bits are the address."""
    large_tls_bytes: int = 128 * 1024 * 1024
    """Of the largest reads of connections with TLS, from LARGE_READ_BYTES on: it keeps 2.4 times as much until they end. A read
    has up to 256 KiB. Above it the longest idle ones are closed, else the new one gets 503."""


class RefusedError(Exception):
    def __init__(self, status: int, reason: ConnectionRefusal, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


RefusalBody = Callable[[bytes, RefusedError], bytes]
"""Of the URL, as far as it was read, and what is refused there: JSON."""


def openai_refusal(_url: bytes, refused: RefusedError) -> bytes:
    return openai_error(refused.status, refused.reason, refused.message)


@dataclass(eq=False)
class Connections:
    limits: HttpLimits
    refusal_body: RefusalBody
    idle: dict["HttpProtocol", float] = field(default_factory=dict)
    """Since when, loop time; longest first. One timer for all is cheaper than one each."""
    opening: dict["HttpProtocol", None] = field(default_factory=dict)
    """With an incomplete head; longest first."""
    large_tls: dict["HttpProtocol", int] = field(default_factory=dict)
    large_tls_bytes: int = 0
    by_address: Counter[str] = field(default_factory=Counter)
    _sweeper: asyncio.TimerHandle | None = None
    _refused: dict[str, int] = field(default_factory=dict)
    _logged_at: dict[str, float] = field(default_factory=dict)

    def is_idle(self, connection: "HttpProtocol") -> None:
        self.idle[connection] = connection.loop.time()
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(connection.timeout_keep_alive, self._sweep, connection.loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection, _ in list(
            takewhile(lambda idle: idle[1] + idle[0].timeout_keep_alive <= now, self.idle.items())
        ):
            del self.idle[connection]
            if connection.has_unsent:
                self.idle[connection] = now
            else:
                connection.close_now()
        longest = next(iter(self.idle.items()), None)
        self._sweeper = None
        if longest is not None:
            due = longest[1] + longest[0].timeout_keep_alive
            self._sweeper = loop.call_at(max(due, now + SWEEP_SECONDS_MIN), self._sweep, loop)

    def evict(self, idle: "HttpProtocol") -> None:
        """Cuts it: a close of TLS waits for the client."""
        del self.idle[idle]
        self.forget_large(idle)
        self.refused("idle_evicted", idle.loop.time())
        idle.transport.abort()

    def forget_large(self, connection: "HttpProtocol") -> None:
        self.large_tls_bytes -= self.large_tls.pop(connection, 0)

    def refused(self, reason: ConnectionRefusal, now: float) -> None:
        HTTP_CONNECTIONS_REFUSED.labels(reason).inc()
        self._refused[reason] = self._refused.get(reason, 0) + 1
        if now - self._logged_at.get(reason, -REFUSAL_LOG_WALL_SECONDS) >= REFUSAL_LOG_WALL_SECONDS:
            self._logged_at[reason] = now
            log.warning("http_connection_refused", reason=reason, times=self._refused.pop(reason))


def http_protocol(limits: HttpLimits, refusal_body: RefusalBody) -> type[asyncio.Protocol]:
    HTTP_CONNECTIONS_REFUSED.show_zeros()
    return cast("type[asyncio.Protocol]", partial(HttpProtocol, shared=Connections(limits, refusal_body)))


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, shared: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._shared = shared
        self._limits = shared.limits
        self.url = b""
        self._head_open = False
        self._head_bytes = 0
        """Read since then, without the first read."""
        self._head_measured = False
        self._offers_upgrade = False
        self._body_open = False
        self._framing_bytes = 0
        """Of an open body, read since its last byte: chunk heads and trailers."""
        self._chunks = 0
        """Of the last read."""
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._address = ""
        self._gone = False
        self._on_gone: Callable[[], None] | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", _OpenTransport(transport, self.loop, self._bound_unsent))
        self.flow = FlowControl(self.transport)
        self._shared.is_idle(self)
        self._address = network_of(self.client[0]) if self.client else ""
        self._shared.by_address[self._address] += 1
        if self._shared.by_address[self._address] > self._limits.connections_per_address:
            self._refuse(RefusedError(503, "connections_per_address", "Too many connections of one address are open."))
        elif len(self.connections) > self._limits.connections:
            self._make_room()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.idle.pop(self, None)
        self._shared.opening.pop(self, None)
        self._shared.forget_large(self)
        self._shared.by_address[self._address] -= 1
        if not self._shared.by_address[self._address]:
            del self._shared.by_address[self._address]
        self._clear_deadline()
        self._clear_send_deadline()
        super().connection_lost(exc)
        cast("_OpenTransport", self.transport).release()
        self._gone = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def when_gone(self, on_gone: Callable[[], None]) -> None:
        """Call it if the client disconnects before the answer has ended; cheaper than a task that waits for
        `http.disconnect`."""
        self.flow.resume_reading()  # else nobody notices
        self._on_gone = on_gone
        if self._gone:
            self.loop.call_soon(on_gone)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_send_deadline()

    @override
    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._clear_send_deadline()
        super().resume_writing()

    @override
    def eof_received(self) -> None:
        self._bound_unsent()  # the transport closes itself

    @override
    def data_received(self, data: bytes) -> None:
        if self.scheme == "https" and len(data) > LARGE_READ_BYTES:
            self._bound_large(len(data))
        if self._refused:
            return
        continued, in_body = self._head_open, self._body_open
        self._head_measured = continued or len(data) > self._limits.head_bytes
        self._framing_bytes += len(data)
        self._chunks = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(_refusal(error))
            return
        if self._chunks > CHUNKS_A_READ:
            cast("_OpenTransport", self.transport).rest(self._chunks * CHUNK_REST_SECONDS)
        if self.pipeline and sum(_held(cycle) for cycle, _ in self.pipeline) > self._limits.pipelined_bytes:
            self._refuse(_too_many_pipelined())
        elif self._head_open:
            self._head_bytes += len(data) if continued else 0
            self._bound_open_head()
        elif self._body_open and self._framing_bytes > self._limits.head_bytes:
            self._refuse(_too_large(self._limits))
        elif not (in_body or self._body_open or self._in_flight):  # empty lines, for instance
            self._shared.idle.pop(self, None)
            self._set_deadline(self._limits.head_seconds)

    @property
    def has_unsent(self) -> bool:
        """Whether its client has to read more of the last answer. It has `send_seconds` for each part."""
        self._bound_unsent()
        return self.transport.get_write_buffer_size() > 0

    def close_now(self) -> None:
        """Close, even if the client has not read the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    @override
    def on_message_begin(self) -> None:
        self._shared.idle.pop(self, None)
        self._head_open = True
        self._head_bytes = 0
        super().on_message_begin()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._body_open:  # else a trailer: dropped, it is none of the request's headers
            super().on_header(name, value)

    @override
    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    @override
    def on_headers_complete(self) -> None:
        self._check_head()
        self._offers_upgrade = self.parser.should_upgrade()
        if self._offers_upgrade:
            if self.parser.get_method() == b"CONNECT":
                raise RefusedError(400, "malformed", "This is no proxy.")
            return
        self._head_open = False
        self._shared.opening.pop(self, None)
        self._body_open = True
        self._framing_bytes = 0
        self._clear_deadline()
        super().on_headers_complete()
        if self._on_gone is not None:  # uvicorn stops reading at a request behind one that is being answered
            self.flow.resume_reading()

    @override
    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._body_open = False
        self._clear_deadline()
        super().on_message_complete()
        if not self._in_flight:  # it was answered before it had ended
            self._shared.is_idle(self)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Java sends an h2c offer with every first request. The parser then loses the body, so a new one parses the
        request without it."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(headers))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(head + rest)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cast("dict[str, Any]", cycle.scope).update({WHEN_GONE: self.when_gone, CLOSE_NOW: self.close_now})
        super()._start_asgi_task(cycle, _without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    @override
    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._on_gone = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._body_open:
            self._set_deadline(self._limits.unread_seconds)
        elif not self._head_open:
            self._shared.is_idle(self)

    @property
    def _in_flight(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever uvicorn declares
        return cycle is not None and not cycle.response_complete

    def _check_head(self) -> None:
        headers = self.headers
        if len(headers) > self._limits.headers:
            raise _too_large(self._limits)
        if self._head_measured and _size(self.url, headers) > self._limits.head_bytes:
            raise _too_large(self._limits)
        if len(self.pipeline) >= self._limits.pipelined:
            raise _too_many_pipelined()
        hosts, encoded = 0, False
        for name, _ in headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                encoded = True
        if hosts == 1 and not encoded:
            return
        old = self.parser.get_http_version() == "1.0"
        if hosts > 1 or (hosts == 0 and not old):
            raise RefusedError(400, "malformed", "A request must have one Host header.")
        if old and encoded:
            raise RefusedError(400, "malformed", "HTTP/1.0 has no Transfer-Encoding.")

    def _bound_open_head(self) -> None:
        if self._head_bytes > self._limits.head_bytes or len(self.headers) > self._limits.headers:
            self._refuse(_too_large(self._limits))
        else:
            if not self._in_flight:
                self._shared.opening.setdefault(self)
            self._set_deadline(self._limits.head_seconds)

    def _make_room(self) -> None:
        shared, longest_idle = self._shared, next(iter(self._shared.idle))
        if longest_idle is not self:
            shared.evict(longest_idle)
        elif shared.opening:
            longest_opening = next(iter(shared.opening))
            del shared.opening[longest_opening]
            shared.refused("opening_evicted", self.loop.time())
            longest_opening.transport.abort()
        else:
            self._refuse(RefusedError(503, "connections", "Too many connections are open. Ask again later."))

    def _bound_large(self, read_bytes: int) -> None:
        """The memory is taken by now; it is given back once the connection is gone."""
        shared, most = self._shared, self._limits.large_tls_bytes
        more = read_bytes - shared.large_tls.get(self, 0)
        if self._refused or more <= 0:
            return
        shared.large_tls[self] = read_bytes
        shared.large_tls_bytes += more
        if shared.large_tls_bytes > most:
            idle = (other for other in list(shared.large_tls) if other in shared.idle and other is not self)
            while shared.large_tls_bytes > most and (other := next(idle, None)) is not None:
                shared.evict(other)
        if shared.large_tls_bytes > most:
            self._refuse(RefusedError(503, "connections", "Too many connections have sent much. Ask again later."))
            self.loop.call_later(UNREAD_REFUSAL_SECONDS, self.transport.abort)

    def _set_deadline(self, seconds: Seconds) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self._overdue)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _bound_unsent(self) -> None:
        """Also of a connection that closes: it ends only once its client has read everything, or is gone."""
        if self._send_deadline is None and self.transport.get_write_buffer_size():
            self._set_send_deadline()

    def _set_send_deadline(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_deadline = self.loop.call_later(self._limits.send_seconds, self._send_overdue)

    def _clear_send_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def _send_overdue(self) -> None:
        """Abort a client that reads nothing: an orderly close would wait for it."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent_bytes:
            self._send_deadline = None
            if unsent:
                self._set_send_deadline()
            return
        self._shared.refused("answer_unread", self.loop.time())
        self.transport.abort()

    def _overdue(self) -> None:
        self._deadline = None
        if self._in_flight:  # the answer to the request before goes on
            self._set_deadline(self._limits.head_seconds)
        elif self._body_open:
            self.transport.close()
        else:
            self._refuse(RefusedError(408, "head_timeout", "The headers did not arrive in time."))

    def _refuse(self, refused: RefusedError) -> None:
        """Answer and close. Further input is discarded for a while, so that the client reads the answer."""
        self._refused = True
        self._shared.refused(refused.reason, self.loop.time())
        self._shared.idle.pop(self, None)
        self._shared.opening.pop(self, None)
        self._clear_deadline()
        if self.transport.is_closing():
            return
        if self._in_flight:
            if not self._body_open or self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
            self.cycle.disconnected = True  # its own body is what is wrong: this is its answer
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.transport.write(_answer(refused, self._shared.refusal_body(self.url, refused)))
        if refused.status == 503 or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._deadline = self.loop.call_later(self._limits.unread_seconds, self.transport.close)


class _OpenTransport:
    """Drops what is written once the connection is closing (uvloop raises RuntimeError then), and writes the head of an
    answer with the first bytes of its body."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_close: Callable[[], None]
    ) -> None:
        self._transport: Any = transport
        self._loop = loop
        self._on_close = on_close
        self._head = b""
        self._is_closing = transport.is_closing
        self._reads = True
        self._resting: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        if self._is_closing():
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) > JOINED_BYTES_MAX:
                self._transport.write(head)
            else:
                data = head + data
        elif data.startswith(HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """asyncio's transport for TLS breaks when it is closed twice."""
        self._flush()
        if not self._is_closing():
            self._transport.close()
            self._on_close()

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def _flush(self) -> None:
        if self._head and not self._is_closing():
            head, self._head = self._head, b""
            self._transport.write(head)

    def pause_reading(self) -> None:
        self._reads = False
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._reads = True
        if self._resting is None:
            self._transport.resume_reading()

    def rest(self, seconds: Seconds) -> None:
        """Read nothing for so long."""
        if self._resting is None:
            self._transport.pause_reading()
            self._resting = self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._resting = None
        if self._reads:
            self._transport.resume_reading()

    def release(self) -> None:
        """Of a connection that is gone. What refers to this is collected late, and TLS holds half a megabyte."""
        self._transport = _Gone()
        self._is_closing = self._transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Gone:
    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def network_of(host: str) -> str:
    """Whom bounds by address count as one: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:  # on a socket of both kinds
        return str(address.ipv4_mapped)
    return ":".join(address.exploded.split(":")[:4])


def _refusal(error: httptools.HttpParserError) -> RefusedError:
    found = error.__context__
    return found if isinstance(found, RefusedError) else RefusedError(400, "malformed", "This is not valid HTTP.")


def _too_large(limits: HttpLimits) -> RefusedError:
    msg = f"The headers are more than {limits.headers}, or larger than {limits.head_bytes} bytes."
    return RefusedError(431, "head_too_large", msg)


def _too_many_pipelined() -> RefusedError:
    return RefusedError(429, "pipelined", "Too many requests were sent before the first was answered.")


def _held(waiting: RequestResponseCycle) -> int:
    scope = waiting.scope
    return len(waiting.body) + _size(scope["raw_path"] + scope["query_string"], [*scope["headers"]])


def _size(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


def _answer(refused: RefusedError, body: bytes) -> bytes:
    more = "retry-after: 1\r\n" if refused.status in (429, 503) else ""
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    return STATUS_LINE[refused.status] + head.encode() + body


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Callable[..., Any]:
    """HTTP/1.0 has no chunks: a response of unknown length ends with the connection."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        ends_by_closing = False

        async def send_plain(message: Any) -> None:
            nonlocal ends_by_closing
            if message["type"] == "http.response.start":
                ends_by_closing = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if ends_by_closing:
                    cycle.chunked_encoding = False
            elif ends_by_closing:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return served
