"""NATS connection over nats-py, the only module that imports it: nats-py connects, signs in and notices a dead server;
messages go past it (`wire`). Works around measured behaviour of nats-py: while disconnected it buffers messages its caller
gave up (buffer disabled); it stops for good on some server errors (client replaced); a first attempt goes on to the next
server only where TCP fails (servers rotated); it notices a dead server after six minutes (ping every 2 s)."""

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from pointsman.adapters.jetstream.connection import (
    SERVER_VERSION_MIN,
    Connection,
    NotConnectedError,
    OnMessage,
    PayloadTooLargeError,
    Subscription,
    UnsendableError,
)
from pointsman.adapters.jetstream.identity import Identity, IdentityError, is_refusal, refusal
from pointsman.adapters.jetstream.optional_imports import without
from pointsman.adapters.jetstream.wire import MessageSplitter, WireMessage, publication
from pointsman.adapters.log_listener import LogListener
from pointsman.adapters.tcp_ports import is_loopback

with without("aiohttp"):  # for WebSockets, which `_TolerantClient` cannot read
    from nats.aio.client import Client, Srv
    from nats.aio.subscription import Subscription as ClientSubscription
    from nats.errors import Error as ClientError

CONNECT_SECONDS_MAX = 2
RECONNECT_SECONDS = 0.2
RECONNECT_JITTER_SECONDS = 0.1
PING_SECONDS = 2
PINGS_UNANSWERED_MAX = 2
CLOSE_SECONDS_MAX = 1.0
ROUND_TRIP_SECONDS_MAX = 1
IDENTITY_RETRY_SECONDS = 2.0
PING_FORGOTTEN_SECONDS = 4 * PING_SECONDS * PINGS_UNANSWERED_MAX
"""By then the client has reconnected and dropped its old pings."""
_FORBIDDEN = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)


class NatsConnection(Connection):
    def __init__(self, url: str, name: str, listener: LogListener, identity: Identity) -> None:
        self._servers = _in_order(url.split(","))
        self._name = name
        self._listener = listener
        self._identity = identity
        self._client: _TolerantClient | None = None
        self._closing: asyncio.Task[None] | None = None
        self._connected = False
        self._subscriptions: dict[int, _NatsSubscription] = {}
        self._watchers: dict[int, Callable[[bool], None]] = {}
        self._on_forbidden: list[Callable[[str, str], None]] = [listener.forbidden]
        self._count = 0

    @property
    @override
    def connected(self) -> bool:
        return self._connected

    @override
    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None, room: int = 0
    ) -> None:
        if self._client is None or not self._connected:
            raise NotConnectedError("not connected to NATS")
        if not self._client.is_connected:
            raise NotConnectedError("the connection to NATS broke")
        if len(payload) + room > self._client.max_payload:
            raise PayloadTooLargeError(
                f"{len(payload)} bytes to {subject} do not fit into {self._client.max_payload} (`max_payload`)"
            )
        try:
            self._client.write_soon(publication(subject, payload, reply, headers))
        except ValueError as error:
            raise UnsendableError(str(error)) from error

    @override
    def write_now(self) -> None:
        if self._client is not None and self._connected:
            self._client.write_now()

    @override
    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> Subscription:
        self._count += 1
        subscription = _NatsSubscription(self._subscriptions, self._count, subject, on_message, queue)
        try:
            if self._client is not None and self._connected:
                await subscription.begin(self._client)
                await _round_trip(self._client)
        except BaseException:  # who subscribes was cancelled: nobody would close it
            await subscription.end()
            raise
        return subscription

    @override
    def on_forbidden(self, on_forbidden: Callable[[str, str], None]) -> None:
        self._on_forbidden.append(on_forbidden)

    @override
    def on_change(self, on_change: Callable[[bool], None]) -> Callable[[], None]:
        self._count += 1
        key = self._count
        self._watchers[key] = on_change

        def forget() -> None:
            self._watchers.pop(key, None)

        return forget

    async def stay_connected(self) -> None:
        """Connect, and replace a client that closed by one that begins at the next server. nats-py itself handles
        reconnects before that."""
        while True:
            try:
                options = self._identity.connect_options()
            except IdentityError as error:
                self._listener.unreachable(str(error))
                await asyncio.sleep(IDENTITY_RETRY_SECONDS)
                continue
            gave_up = asyncio.Event()
            needs_tls = self._identity.needs_tls or any(url.startswith("tls:") for url in self._servers)
            client = self._client = _TolerantClient(
                needs_tls=needs_tls, on_forbidden=self._forbidden, on_failure=self._message_failed
            )
            try:
                await self._connect(client, gave_up, options)
                await gave_up.wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, another attempt may go well
                if error is not client.last_error:  # else told by `on_error`
                    self._listener.unreachable(refusal(error, self._identity))
            with contextlib.suppress(Exception):
                await client.give_up()
            self._change(connected=False, detail="the client gave up")
            self._servers = [*self._servers[1:], self._servers[0]]
            await asyncio.sleep(RECONNECT_SECONDS)

    async def close(self) -> None:
        client, self._client = self._client, None
        self._connected = False
        if client is not None:
            with contextlib.suppress(Exception):  # closing while disconnected can fail in several ways (measured)
                await asyncio.wait_for(client.close(), CLOSE_SECONDS_MAX)

    async def _connect(self, client: "_TolerantClient", gave_up: asyncio.Event, options: dict[str, Any]) -> None:
        async def on_error(error: Exception) -> None:
            if self._connected:
                self._listener.trouble("connection", f"{type(error).__name__}: {error}")
                return
            self._listener.unreachable(refusal(error, self._identity))
            if is_refusal(error) and client.options["allow_reconnect"]:
                self._closing = asyncio.create_task(client.give_up())  # the next client reads the files anew

        async def on_disconnected() -> None:
            _drop_unsent(client)
            self._change(connected=False, detail="the connection to NATS broke")

        async def on_reconnected() -> None:
            await self._begin(client)

        async def on_closed() -> None:
            if self._client is client and client.last_error is not None:
                self._listener.unreachable(refusal(client.last_error, self._identity))
            gave_up.set()

        await client.connect(
            servers=self._servers,
            name=self._name,
            connect_timeout=CONNECT_SECONDS_MAX,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_SECONDS + random.uniform(0, RECONNECT_JITTER_SECONDS),  # type: ignore[arg-type]
            ping_interval=PING_SECONDS,
            max_outstanding_pings=PINGS_UNANSWERED_MAX,
            pending_size=0,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            closed_cb=on_closed,
            allow_reconnect=False,
            dont_randomize=True,
            **options,
        )
        client.options["allow_reconnect"] = True
        await self._begin(client)

    def _message_failed(self, error: Exception) -> None:
        self._listener.trouble("message", f"{type(error).__name__}: {error}")

    def _forbidden(self, operation: str, subject: str) -> None:
        for on_forbidden in self._on_forbidden:
            on_forbidden(operation, subject)

    async def _begin(self, client: "_TolerantClient") -> None:
        """nats-py repeats the subscriptions that its client had, and knows none that was made while disconnected."""
        while (missing := self._not_begun_at(client)) is not None:
            await missing.begin(client)
        if not client.is_connected:
            return
        version = client.connected_server_version
        known = (version.major, version.minor, version.patch)
        self._listener.outdated("" if known >= SERVER_VERSION_MIN else ".".join(map(str, known)))
        self._change(connected=True, detail=_server_of(client))

    def _not_begun_at(self, client: Client) -> "_NatsSubscription | None":
        return next((each for each in self._subscriptions.values() if each.client is not client), None)

    def _change(self, *, connected: bool, detail: str) -> None:
        if connected == self._connected or self._client is None:
            return
        self._connected = connected
        if connected:
            self._listener.connected(detail)
        else:
            self._listener.disconnected(detail)
        for on_change in list(self._watchers.values()):
            on_change(connected)


class _TolerantClient(Client):
    """nats-py tells refused subjects only as text in lower case, and speaks in the clear to a server that offers no TLS."""

    def __init__(
        self,
        *,
        needs_tls: bool,
        on_forbidden: Callable[[str, str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self._on_forbidden = on_forbidden
        self._on_failure = on_failure
        self._listeners: dict[int, OnMessage] = {}
        self._writes_soon = False
        self._ending: asyncio.Task[None] | None = None
        self._ended = False
        """Stays; nats-py's status becomes another once an attempt to reconnect goes on."""

    async def listen(self, subject: str, on_message: OnMessage, queue: str) -> ClientSubscription:
        begun = await self.subscribe(subject, queue=queue)
        self._listeners[begun._id] = on_message  # noqa: SLF001 - nothing is read before this turn ends
        return begun

    def write_soon(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_data_size += len(data)
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_pending)

    def write_now(self) -> None:
        """Behind what nats-py has to send itself."""
        if self._pending and self.is_connected and self._transport:
            data = b"".join(self._pending)
            _drop_unsent(self)
            with contextlib.suppress(RuntimeError, OSError):  # it closes: reading ends, too, and then it is noticed
                self._transport.write(data)

    def _write_pending(self) -> None:
        self._writes_soon = False
        self.write_now()

    @override
    async def _read_loop(self) -> None:
        """Begins with each connection. nats-py reads what the splitter leaves to it."""
        reader = self._transport._io_reader  # type: ignore[union-attr]  # noqa: SLF001 - there is no public one
        left = bytes(reader._buffer)  # noqa: SLF001 - read with the answer to CONNECT
        reader._buffer.clear()  # noqa: SLF001
        reader.feed_data = MessageSplitter(self._deliver, reader.feed_data, left).feed
        await super()._read_loop()

    @override
    async def _attempt_reconnect(self) -> None:
        """What nats-py does not expect would end this task unseen."""
        self._abort()
        try:
            await super()._attempt_reconnect()
        except Exception as error:  # noqa: BLE001 - told when the client has closed, and the next one connects
            self._err = error
            self._ending = asyncio.create_task(self.give_up())

    @override
    async def _connect_to_server(self, s: Srv) -> None:
        """nats-py forgets the connection of a handshake that failed, open."""
        self._abort()
        await super()._connect_to_server(s)

    @override
    async def _process_op_err(self, e: Exception) -> None:
        if not self._ended:
            await super()._process_op_err(e)

    @override
    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """nats-py cancels an attempt to reconnect once. One that is about to succeed swallows that (Python 3.11), and a
        closed client would go on connecting for ever."""
        self._ended = True
        attempt = self._reconnection_task
        while attempt is not None and attempt is not asyncio.current_task() and not attempt.done():
            attempt.cancel()
            await asyncio.wait([attempt], timeout=RECONNECT_SECONDS)
        await super()._close(status, do_cbs)

    async def give_up(self) -> None:
        """Close without waiting for the server."""
        self._abort()
        await self.close()

    def _abort(self) -> None:
        """nats-py would close in order and wait: under TLS for the server's answer, 30 s or for ever (measured), in the
        clear until unsent bytes have left. A server whose host vanished answers nothing."""
        transport, self._transport = self._transport, None
        writer = transport._io_writer if transport else None  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public one
        if writer:  # TCP was connected
            writer.transport.abort()

    def _deliver(self, number: int, message: WireMessage) -> None:
        on_message = self._listeners.get(number)
        if on_message is None or number not in self._subs:
            return
        try:
            on_message(message)
        except Exception as error:  # noqa: BLE001 - one bad message must not end the connection
            self._on_failure(error)

    @override
    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._listeners.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    @override
    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._needs_tls and not info.get("tls_required"):
            raise ClientError("the nats-server offers no TLS, which --nats-ca, --nats-certificate or tls:// demand")
        await super()._process_info(info, initial_connection)

    @override
    async def _process_err(self, err_msg: str) -> None:
        found = _FORBIDDEN.search(err_msg)
        if found is None:
            await super()._process_err(err_msg)
        else:
            self._on_forbidden(found[1], found[2])


class _NatsSubscription(Subscription):
    def __init__(
        self,
        registry: "dict[int, _NatsSubscription]",
        key: int,
        subject: str,
        on_message: OnMessage,
        queue: str,
    ) -> None:
        self._registry = registry
        self._key = key
        self._subject = subject
        self._on_message = on_message
        self._queue = queue
        self.client: Client | None = None
        """Where it began."""
        self._begun: ClientSubscription | None = None
        registry[key] = self

    async def begin(self, client: _TolerantClient) -> None:
        self.client = client
        with contextlib.suppress(ClientError):  # the client closed: the next one begins again
            self._begun = await client.listen(self._subject, self._on_message, self._queue)

    @override
    async def close(self) -> None:
        if await self.end() and self.client is not None and self.client.is_connected:
            await _round_trip(self.client)

    async def end(self) -> bool:
        """Whether it had begun. Does not wait for the server."""
        self._registry.pop(self._key, None)
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        with contextlib.suppress(ClientError):
            await begun.unsubscribe()
        return True


def _in_order(servers: list[str]) -> list[str]:
    """Shuffled, and this host's own server first: a connection to it breaks with this host alone."""
    return sorted(random.sample(servers, len(servers)), key=lambda url: not is_loopback(urlsplit(url).hostname or ""))


def _drop_unsent(client: Client) -> None:
    """Unsent data would precede older writes on the next connection (seen in 10% of crashes). There is no public
    call."""
    client._pending.clear()  # noqa: SLF001
    client._pending_data_size = 0  # noqa: SLF001


async def _round_trip(client: Client) -> None:
    """Wait until the server has processed what was sent. Never cancelled: the answer to an abandoned ping ends
    nats-py's reading."""
    trip = asyncio.create_task(_pinged_twice(client))
    _round_trips.add(trip)
    trip.add_done_callback(_round_trips.discard)
    await asyncio.wait([trip], timeout=ROUND_TRIP_SECONDS_MAX)


_round_trips: set[asyncio.Task[None]] = set()


async def _pinged_twice(client: Client) -> None:
    """Twice: the client's first ping can overtake data that waits for its flusher."""
    with contextlib.suppress(ClientError):
        for _ in range(2):
            if client.is_connected:
                await client.flush(PING_FORGOTTEN_SECONDS)


def _server_of(client: Client) -> str:
    url = client.connected_url
    return f"{url.hostname}:{url.port}" if url is not None else "unknown"
