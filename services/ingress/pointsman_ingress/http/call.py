"""One HTTP exchange with a client: in, a request as ASGI gives it; out, an answer that is begun and ended once."""

import asyncio
from collections.abc import Iterable
from functools import cache
from itertools import count
from random import Random

from prometheus_client import Counter as Metric

from pointsman.contracts.subjects import REQUEST_ID_PATTERN
from pointsman.ports import Clock
from pointsman.primitives import RequestId, WallSeconds
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.runtime.telemetry import HTTP_REQUESTS
from pointsman_ingress.http.errors import ApiError, ErrorShape, Header, body_too_large, body_too_slow, too_many_bodies
from pointsman_ingress.http.request_headers import Headers, header_text

BODY_WALL_SECONDS: WallSeconds = WallSeconds(30.0)  # how long a client may take to send its body
UNFINISHED_BODIES_BYTES_MAX = 256 * 1024 * 1024
"""Of all bodies that are being read. One that arrives in one piece is never counted."""
RECENT_IDS_MAX = 100_000
"""Request ids chosen by clients that are remembered, so that a second use of one gets an id of its own."""
JSON = "application/json"


class ClientGoneError(Exception):
    """The client hung up before its body was read."""


class RequestIds:
    """Gives each request an id that is unique in the log, the client's own if possible."""

    def __init__(self, chance: Random) -> None:
        self._prefix = f"{chance.getrandbits(48):012x}"
        self._numbers = count(1)
        self._recent: dict[str, None] = {}

    def take(self, wanted: str) -> RequestId:
        """`wanted` if it is a valid id and was not used recently, else a new one."""
        if not wanted or wanted in self._recent or not REQUEST_ID_PATTERN.match(wanted):
            return self.fresh()
        self._recent[wanted] = None
        if len(self._recent) > RECENT_IDS_MAX:
            del self._recent[next(iter(self._recent))]
        return RequestId(wanted)

    def fresh(self) -> RequestId:
        return RequestId(f"{self._prefix}-{next(self._numbers)}")


class BodyBudget:
    """Bytes of unfinished bodies that this process holds, over all clients."""

    def __init__(self, bytes_max: int = UNFINISHED_BODIES_BYTES_MAX) -> None:
        self._bytes_left = bytes_max

    def take(self, size: int) -> None:
        """Raises ApiError (503)."""
        if size > self._bytes_left:
            raise too_many_bodies()
        self._bytes_left -= size

    def give_back(self, size: int) -> None:
        self._bytes_left += size


class Call:
    """One exchange. Only our own response headers and the engine's content type reach the client."""

    def __init__(
        self, path: str, errors: ErrorShape, scope: Scope, send: Send, *, ids: RequestIds, clock: Clock
    ) -> None:
        self.path = path
        self.method: str = scope["method"]
        self.client: str | None = (scope.get("client") or (None,))[0]  # its address
        self.headers: Headers = dict(scope["headers"])
        self.arrived_at = clock.now()  # engine time
        self.received_at_wall = clock.wall()
        self.first_byte_at_wall: WallSeconds | None = None  # when the first bytes of the answer's body were sent
        sent_id = header_text(self.headers, b"x-request-id")
        self.id = ids.take(sent_id)
        self.status = 0  # 0 until the answer has begun
        self.error_code = ""
        self.request_bytes = 0
        self.response_bytes = 0  # of the bodies
        self._errors = errors
        self._clock = clock
        self._streaming = False
        self._id_header = (b"x-request-id", (sent_id or self.id).encode())
        self._send = send

    async def read_body(self, receive: Receive, budget: BodyBudget, *, bytes_max: int) -> bytes:
        """Raises ApiError (413, 408, 503) and ClientGoneError."""
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > bytes_max:
            raise body_too_large(bytes_max)
        try:
            async with asyncio.timeout(float(BODY_WALL_SECONDS)):
                body = await _body(receive, budget, bytes_max)
        except TimeoutError as error:
            raise body_too_slow() from error
        self.request_bytes = len(body)
        return body

    async def start(self, content_type: str, headers: Iterable[Header], *, length: int | None) -> None:
        """Send status 200 and headers. `length` None: the body is streamed."""
        self._streaming = length is None
        last = (b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length)
        self._begin(200)
        head = [(b"content-type", content_type.encode("latin-1")), self._id_header, *headers, last]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, chunk: bytes) -> None:
        self._count(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        self._streaming = False
        self._count(last)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, status: int, body: bytes, content_type: str, headers: Iterable[Header] = ()) -> None:
        self._begin(status)
        self._count(body)
        await send_whole(self._send, status, body, content_type, [self._id_header, *headers])

    async def fail(self, error: ApiError, *, mid_event: bool = False) -> None:
        """Send an error as the whole answer, or as the last event of a stream that has begun.

        `mid_event`: separate it from an unfinished event. An answer whose length was announced cannot be taken back:
        the server then closes the connection.
        """
        self.error_code = self.error_code or error.code
        if not self.status:
            await self.answer(error.status, self._errors.body(error), JSON, error.headers)
        elif self._streaming:
            event = self._errors.event(error)
            await self.finish(b"\n\n" + event if mid_event else event)

    def _begin(self, status: int) -> None:
        self.status = status
        _requests_metric(self.path, status).inc()

    def _count(self, chunk: bytes) -> None:
        self.response_bytes += len(chunk)
        if chunk and self.first_byte_at_wall is None:
            self.first_byte_at_wall = self._clock.wall()


async def _body(receive: Receive, budget: BodyBudget, bytes_max: int) -> bytes:
    part, more = await _part(receive)
    if len(part) > bytes_max:
        raise body_too_large(bytes_max)
    if not more:
        return part
    parts, size = [part], len(part)
    budget.take(size)
    try:
        while more:
            part, more = await _part(receive)
            if size + len(part) > bytes_max:
                raise body_too_large(bytes_max)
            budget.take(len(part))
            size += len(part)
            parts.append(part)
        return b"".join(parts)
    finally:
        budget.give_back(size)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """A piece of the body, and whether there are more. Raises ClientGoneError."""
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


@cache
def _requests_metric(path: str, status: int) -> Metric:
    """Looking a metric up by labels costs more than counting."""
    return HTTP_REQUESTS.labels(path, str(status))
