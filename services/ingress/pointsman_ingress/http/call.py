"""One HTTP exchange with a client: reads the body and sends one answer over ASGI."""

import codecs
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Self

from pointsman.adapters.clocks import SteadyClock
from pointsman.adapters.shared_timers import SharedTimer
from pointsman.adapters.sse import EVENT_END_BYTES_MAX, ends_event
from pointsman.ports import Clock
from pointsman.primitives import InstanceId, PoolName, RequestId, Seconds, Tenant, Tokens, WallSeconds
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.runtime.http_protocol import CLOSE_NOW
from pointsman.runtime.tracing import NO_SPAN, Span
from pointsman_ingress.http import errors
from pointsman_ingress.http.errors import ApiError, ErrorShape, Header
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.request_headers import Headers, header_text

BODY_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
"""For each part of a body. All have as long together, and as its bytes take at BODY_BYTES_A_SECOND."""
BODY_BYTES_A_SECOND = 64_000
BODIES_BYTES_MAX = 512 * 1024 * 1024
FREE_BYTES_MAX = 64 * 1024
ID_BITS = 96
JSON = "application/json"
CLIENT_REQUEST_ID = b"x-request-id"
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected before an answer


class ClientGoneError(Exception):
    """The client disconnected before its body was read."""


class RequestIds:
    """Ids in the log: 96 random bits, so that no client predicts, takes or repeats another's."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def fresh(self) -> RequestId:
        return RequestId(f"{self._chance.getrandbits(ID_BITS):0{ID_BITS // 4}x}")


def id_headers(own: RequestId, client_request_id: str, *names: bytes) -> list[Header]:
    """Of every answer. `names`: of further headers with the client's id, or ours."""
    ours = own.encode()
    told = client_request_id.encode() or ours
    return [(CLIENT_REQUEST_ID, told), (b"x-pointsman-request-id", ours), *((name, told) for name in names)]


def with_id_headers(send: Send, scope: Scope, own: RequestId, *names: bytes) -> Send:
    """For an answer of no HttpExchange."""
    ids = id_headers(own, header_text(dict(scope["headers"]), CLIENT_REQUEST_ID), *names)

    async def send_with_ids(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*ids, *message.get("headers", ())]}
        await send(message)

    return send_with_ids


class BodyBudget:
    """Bytes of the bodies that are read or held for retries, and of answers that are passed on whole; small ones do not
    count. Each owner (a tenant, else a client's address) has half of them at most."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self._bytes_left = bytes_max
        self.share = bytes_max // 2
        self._held: dict[str, int] = {}
        self.time = SharedTimer(float(BODY_WALL_SECONDS))
        """For the next part of one."""

    @classmethod
    def of_process(cls, processes: int, body_bytes_max: int) -> Self:
        """`processes` share the bytes. Any one body has room, beside the copy of it that engines get."""
        return cls(max(BODIES_BYTES_MAX // processes, 4 * body_bytes_max))

    def take(self, owner: str, size: int) -> None:
        """Raises ApiError (503)."""
        held = self._held.get(owner, 0) + size
        if size > self._bytes_left or held > self.share:
            raise errors.too_many_bodies()
        self._bytes_left -= size
        self._held[owner] = held

    def give_back(self, owner: str, size: int) -> None:
        self._bytes_left += size
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]


class BodyLoan:
    """What one request has taken of the budget."""

    def __init__(self, budget: BodyBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._size = 0
        self._taken = 0

    @property
    def time(self) -> SharedTimer:
        """For the next part of the body."""
        return self._budget.time

    def add(self, size: int) -> None:
        """Raises ApiError (503)."""
        self._size += size
        if self._size > FREE_BYTES_MAX:
            self._budget.take(self._owner, self._size - self._taken)
            self._taken = self._size

    @property
    def left(self) -> int:
        """The most that can ever be added."""
        return self._budget.share - self._size

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is added within is given back."""
        size = self._size
        try:
            yield
        finally:
            self._shrink(size)

    def end(self) -> None:
        self._shrink(0)

    def _shrink(self, size: int) -> None:
        kept = size if size > FREE_BYTES_MAX else 0
        if kept < self._taken:
            self._budget.give_back(self._owner, self._taken - kept)
            self._taken = kept
        self._size = size


@dataclass(slots=True)
class RequestFacts:
    """What is known of a request, while it is read and served: for the access log, metrics and spans."""

    identity: Identity | None = None
    tenant: Tenant | None = None
    model: str | None = None
    pool: PoolName | None = None
    stream: bool = False
    prompt_tokens: Tokens | None = None
    instance: InstanceId | None = None
    retries: int = 0
    reason: str = ""
    """Why it was not served; empty if it was."""
    light: bool = False
    """Whether its body may be worked on in the event loop."""


class HttpExchange:
    """Forwards only our response headers and the engine's content type."""

    def __init__(
        self, path: str, errors: ErrorShape, scope: Scope, send: Send, *, ids: RequestIds, clock: Clock
    ) -> None:
        self.path = path
        self.method: str = scope["method"]
        self.client: str | None = (scope.get("client") or (None,))[0]
        self.headers: Headers = dict(scope["headers"])
        self.clock = SteadyClock(clock)  # dates all that happens to the request
        self.arrived_at = self.clock.now()
        self.received_at_wall = clock.wall()
        self.first_byte_at_wall: WallSeconds | None = None
        self.id = ids.fresh()
        self.client_request_id = header_text(self.headers, CLIENT_REQUEST_ID)
        self.facts = RequestFacts()
        self.span: Span = NO_SPAN
        self.status = 0  # 0: not started
        self.error_code = ""
        self.request_bytes = 0
        self.response_bytes = 0
        self._errors = errors
        self._streaming = False
        self._written = b""  # the last bytes of a stream
        self._finished = False
        self._send = send
        self._close_now = scope.get(CLOSE_NOW)

    @property
    def owner(self) -> str:
        """Whose share of work threads, body memory and held requests it takes. Not the tenant that a client without a key
        names."""
        identity = self.facts.identity
        return (identity.tenant if identity is not None else "") or self.client or ""

    @property
    def first_byte_seconds(self) -> Seconds | None:
        """Wall seconds from its head to the first byte of an answer."""
        return None if self.first_byte_at_wall is None else float(self.first_byte_at_wall - self.received_at_wall)

    @property
    def final_status(self) -> int:
        return self.status or CLIENT_CLOSED_REQUEST

    async def read_body(self, receive: Receive, loan: BodyLoan, *, bytes_max: int) -> bytes:
        """Without a byte order mark. Raises ApiError (415, 413, 408, 503) and ClientGoneError."""
        if self.headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
            raise errors.encoded_body()
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > bytes_max:
            raise errors.body_too_large(bytes_max)
        body = await _body(receive, loan, bytes_max, self.clock)
        self.request_bytes = len(body)
        return body.removeprefix(codecs.BOM_UTF8)

    async def start(self, content_type: str, headers: Iterable[Header], *, length: int | None) -> None:
        self._streaming = length is None
        last = (b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length)
        self.status = 200
        head = [(b"content-type", content_type.encode("latin-1")), *self._id_headers, *headers, last]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, chunk: bytes) -> None:
        self._count(chunk)
        self._written = (self._written + chunk[-EVENT_END_BYTES_MAX:])[-EVENT_END_BYTES_MAX:]
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        """Returns once the client has read most of what was written before."""
        self._streaming = False
        self._count(last)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        self._finished = True

    async def answer(self, status: int, body: bytes, content_type: str, headers: Iterable[Header] = ()) -> None:
        self.status = status
        self._count(body)
        await send_whole(self._send, status, body, content_type, [*self._id_headers, *headers])
        self._finished = True

    async def fail(self, error: ApiError, *, events: int = 0) -> None:
        """Sends an error as the answer, or as a stream's last event, after so many; ends an event that the client has in
        part. Of a whole answer that has begun the client gets no more."""
        self.error_code = self.error_code or error.code
        if not self.status:
            await self.answer(error.status, self._errors.body(error), JSON, error.headers)
        elif self._streaming:
            event = self._errors.event(error, events)
            await self.finish(b"\n\n" + event if self._written and not ends_event(self._written) else event)
        elif not self._finished:
            self.cut()

    def cut(self) -> None:
        """Close the connection with what the client has not read."""
        if self._close_now is not None:
            self._close_now()

    @property
    def _id_headers(self) -> list[Header]:
        return id_headers(self.id, self.client_request_id, *self._errors.id_headers)

    def _count(self, chunk: bytes) -> None:
        self.response_bytes += len(chunk)
        if chunk and self.first_byte_at_wall is None:
            self.first_byte_at_wall = self.clock.wall()


async def _body(receive: Receive, loan: BodyLoan, bytes_max: int, clock: Clock) -> bytes:
    parts, size, more = [], 0, True
    began = clock.wall()
    while more:
        try:
            with loan.time.limit():
                part, more = await _part(receive)
        except TimeoutError as error:
            raise errors.body_too_slow() from error
        size += len(part)
        if size > bytes_max:
            raise errors.body_too_large(bytes_max)
        if clock.wall() - began > WallSeconds(loan.time.length + size / BODY_BYTES_A_SECOND):
            raise errors.body_too_slow()
        loan.add(len(part))
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Raises ClientGoneError."""
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)
