"""Accepts TLS connections for a protocol. In: listening sockets, an SSLContext. Bounds the handshakes in progress, which servers
of asyncio and uvloop do not count: each takes 60 kB, before anything is known of the client."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from pointsman.primitives import Seconds
from pointsman.runtime.http_protocol import network_of
from pointsman.runtime.telemetry import HTTP_CONNECTIONS_REFUSED

log = structlog.get_logger()

HANDSHAKE_SECONDS: Seconds = 5.0
HANDSHAKES_MAX = 1024
"""Above it the longest one is given up: of the new client's address, if that has half of all."""
ACCEPTS_MAX = 64
"""In one turn of the event loop."""
NO_FILE_LEFT_SECONDS: Seconds = 0.5


class TlsServer:
    """As asyncio.Server, as far as HttpServer uses it."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        create: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        *,
        shutdown_seconds: Seconds,
    ) -> None:
        """Takes over `sockets`, which listen. `create`: a connection's protocol."""
        self.sockets = sockets
        self._create = create
        self._context = context
        self._shutdown_seconds = shutdown_seconds
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """With the client's network; longest first."""
        for listener in sockets:
            listener.setblocking(False)
            self._listen(listener)

    def close(self) -> None:
        for listener in self.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        for handshake in list(self._handshakes):
            handshake.cancel()

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("accept_failed", reason=str(error))
                self._loop.remove_reader(listener)
                self._loop.call_later(NO_FILE_LEFT_SECONDS, self._listen, listener)
                return
            connection.setblocking(False)
            network = network_of(address[0])
            if len(self._handshakes) >= HANDSHAKES_MAX:
                self._make_room(network)
            handshake = self._loop.create_task(self._shake_hands(connection))
            self._handshakes[handshake] = network
            handshake.add_done_callback(lambda ended: self._handshakes.pop(ended, None))

    def _make_room(self, network: str) -> None:
        own = [handshake for handshake, of in self._handshakes.items() if of == network]
        longest = own[0] if len(own) >= HANDSHAKES_MAX // 2 else next(iter(self._handshakes))
        del self._handshakes[longest]
        longest.cancel()
        HTTP_CONNECTIONS_REFUSED.labels("opening_evicted").inc()

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):
                await self._loop.connect_accepted_socket(
                    self._create,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=self._shutdown_seconds,
                )
        except BaseException:
            connection.close()
            raise


def listening(backlog: int, *, host: str = "", port: int = 0, sock: socket.socket | None = None) -> list[socket.socket]:
    """One for each address of `host`, or `sock`, which is bound. Raises OSError."""
    if sock is not None:
        sock.listen(backlog)
        return [sock]
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [socket.create_server(address, family=family, backlog=backlog) for family, *_, address in found]
