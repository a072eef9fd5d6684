"""The client's side of a request: what came over HTTP, and the answer that goes back.

Only our own response headers and the engine's content type reach the client.
"""

import asyncio
from collections import OrderedDict
from itertools import count
from random import Random

from prometheus_client import Counter as Metric

from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.subjects import REQUEST_ID_PATTERN
from pointsman.ports import Clock
from pointsman.primitives import InstanceId, PoolName, RequestId, Seconds, Tenant, Tokens
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman.runtime.telemetry import HTTP_REQUESTS
from pointsman_ingress.http.bodies import Bodies
from pointsman_ingress.http.endpoints import Endpoint
from pointsman_ingress.http.openai_errors import Refusal, body_too_large, timed_out
from pointsman_ingress.http.request_headers import Headers, header_text

RECENT_IDS_MAX = 100_000
"""Request ids that clients chose and that are remembered, so that a second use of one gets an id of its own."""

BODY_WALL_SECONDS: Seconds = 30.0
"""How long a client may take to send its body."""

JSON = "application/json"


class ClientGoneError(Exception):
    """The client hung up before it had said what it wants."""


class RequestIds:
    """Gives each request an id that no other has in the log, the client's own where that is possible."""

    def __init__(self, chance: Random) -> None:
        self._prefix = f"{chance.getrandbits(48):012x}"
        self._numbers = count(1)
        self._recent: OrderedDict[str, None] = OrderedDict()

    def take(self, wanted: str) -> RequestId:
        """`wanted` if it may be an id and was not seen lately, else a new one."""
        if not wanted or wanted in self._recent or not REQUEST_ID_PATTERN.match(wanted):
            return self.fresh()
        self._recent[wanted] = None
        if len(self._recent) > RECENT_IDS_MAX:
            self._recent.popitem(last=False)
        return RequestId(wanted)

    def fresh(self) -> RequestId:
        """An id that nobody else has."""
        return RequestId(f"{self._prefix}-{next(self._numbers)}")


class Call:
    """One HTTP exchange: first what was asked, then the answer, which can be begun and ended once."""

    def __init__(self, endpoint: Endpoint, scope: Scope, send: Send, *, ids: RequestIds, clock: Clock) -> None:
        self.endpoint = endpoint
        self.method: str = scope["method"]
        self.client: str | None = (scope.get("client") or (None,))[0]
        """Its address."""
        self.headers: Headers = dict(scope["headers"])
        self.arrived_at = clock.now()
        """Engine time."""
        self.received_at_wall = clock.wall()
        self.first_byte_at_wall: Seconds = 0.0
        """When the first bytes of the answer's body were sent; 0 before."""
        shown = header_text(self.headers, b"x-request-id")
        self.id = ids.take(shown)
        self.body = b""
        self.key_name: Tenant | None = None
        """Whose API key was shown; None where nobody asks for one."""
        self.prefix = "exact"
        """How much of the prompt block keys are known for, as the client is told."""
        self.comparable = True
        """Whether the cached tokens that the engine reports can be held against those predicted."""
        self.asks_usage = False
        """Whether the engine is asked for the stream's usage, of which the client wants to hear nothing."""
        self.output_bounded = True
        """Whether the client, or the model's context, bounds how much comes out."""
        self.tenant: Tenant | None = None
        self.model: str | None = None
        self.pool: PoolName | None = None
        self.wants_stream = False
        self.prompt_tokens: Tokens | None = None
        """As we count them."""
        self.instance: InstanceId | None = None
        """What answered, where no scheduler granted it."""
        self.retries = 0
        self.reason = ""
        """Why it did not end well, as far as this end of it knows."""
        self.status = 0
        """0 until the answer has begun."""
        self.request_bytes = 0
        self.response_bytes = 0
        """Of the bodies."""
        self._clock = clock
        self._streaming = False
        self._id_header = (b"x-request-id", (shown or self.id).encode())
        self._send = send

    async def read_body(self, receive: Receive, bodies: Bodies, *, bytes_max: int) -> None:
        """Take in the whole body, which counts among `bodies` meanwhile. Raises Refusal (413, 408, 503) and
        ClientGoneError."""
        if self._announced_bytes() > bytes_max:
            raise body_too_large(bytes_max)
        try:
            async with asyncio.timeout(BODY_WALL_SECONDS):
                self.body = await _body(receive, bodies, bytes_max)
                self.request_bytes = len(self.body)
        except TimeoutError as error:
            msg = "The body did not arrive in time."
            raise timed_out(msg) from error

    async def start(self, content_type: str, grant: RouteGranted, *, knowledge: str, length: int | None) -> None:
        """Status 200 and headers. `length` None: the body is streamed."""
        headers = [
            (b"content-type", content_type.encode("latin-1")),
            self._id_header,
            (b"x-pointsman-instance", grant.instance.encode()),
            (b"x-pointsman-cached-tokens", b"%d" % grant.hit_tokens),
            (b"x-pointsman-predicted-ttft-ms", b"%.1f" % (grant.predicted_ttft * 1000)),
            (b"x-pointsman-knowledge", knowledge.encode()),
            (b"x-pointsman-prefix", self.prefix.encode()),
        ]
        if grant.prefilled_by:
            headers.append((b"x-pointsman-prefill-instance", grant.prefilled_by.encode()))
        if length is None:
            self._streaming = True
            headers.append((b"cache-control", b"no-cache"))
        else:
            headers.append((b"content-length", b"%d" % length))
        self._begin(200)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        self._count(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        self._streaming = False
        self._count(last)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def refuse(self, refusal: Refusal, *, mid_event: bool = False) -> None:
        """A refusal as the whole answer, or, in a stream that has begun, as an error event at its end.

        `mid_event` sets the event apart from the unfinished one before it. An answer that is already under way
        with its length announced cannot be taken back: the server then closes the connection.
        """
        errors = self.endpoint.errors
        self.reason = self.reason or refusal.code
        if not self.status:
            body = errors.body(refusal.status, refusal.code, refusal.message, refusal.param)
            await self.pass_on(refusal.status, body, JSON, refusal.headers)
        elif self._streaming:
            event = errors.event(refusal.status, refusal.code, refusal.message)
            await self.finish(b"\n\n" + event if mid_event else event)

    async def answer(self, status: int, body: bytes, content_type: str, instance: InstanceId) -> None:
        """A complete answer of an engine that was not granted by a scheduler."""
        self.instance = instance
        await self.pass_on(status, body, content_type, ((b"x-pointsman-instance", instance.encode()),))

    async def pass_on(
        self, status: int, body: bytes, content_type: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """A complete answer, with no more headers of ours than `headers`."""
        self._begin(status)
        self._count(body)
        await send_whole(self._send, status, body, content_type, [self._id_header, *headers])

    def _begin(self, status: int) -> None:
        self.status = status
        _answered(self.endpoint.path, status).inc()

    def _count(self, chunk: bytes) -> None:
        self.response_bytes += len(chunk)
        if chunk and not self.first_byte_at_wall:
            self.first_byte_at_wall = self._clock.wall()

    def _announced_bytes(self) -> int:
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() else 0


async def _body(receive: Receive, bodies: Bodies, bytes_max: int) -> bytes:
    part, more = await _part(receive)
    if len(part) > bytes_max:
        raise body_too_large(bytes_max)
    if not more:
        return part
    parts, size = [part], len(part)
    with bodies.reading() as take:
        take(size)
        while more:
            part, more = await _part(receive)
            size += len(part)
            if size > bytes_max:
                raise body_too_large(bytes_max)
            take(len(part))
            parts.append(part)
        return b"".join(parts)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """A piece of the body, and whether there are more. Raises ClientGoneError."""
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


_answered_counters: dict[tuple[str, int], Metric] = {}


def _answered(path: str, status: int) -> Metric:
    found = _answered_counters.get((path, status))
    if found is None:
        found = _answered_counters[path, status] = HTTP_REQUESTS.labels(path, str(status))
    return found
