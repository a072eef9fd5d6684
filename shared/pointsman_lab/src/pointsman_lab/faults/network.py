"""A TCP proxy before the nats-server. *Cut*: all connections are closed, none is accepted. *Delay*: each direction is
delayed. *Drop*: about half of the connections pass nothing and are then closed."""

import asyncio
import contextlib
import random

from pointsman.primitives import EngineSeconds

CHUNK_BYTES = 256 * 1024
DELAY_SECONDS = 0.05
DROPPED_SHARE = 0.5


class _Connection:
    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        self.dropping = False

    def close(self) -> None:
        for side in (self.near, self.far):
            side.transport.abort()


class Network:
    def __init__(self, port: int, *, chance: random.Random) -> None:
        self._port = port
        self._chance = chance
        self._connections: set[_Connection] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._delayed = False
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._close_all(list(self._connections))
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def cut(self, seconds: EngineSeconds) -> None:
        self._refusing = True
        self._close_all(list(self._connections))
        try:
            await asyncio.sleep(seconds)
        finally:
            self._refusing = False

    async def delay(self, seconds: EngineSeconds) -> None:
        self._delayed = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._delayed = False

    async def drop(self, seconds: EngineSeconds) -> None:
        struck = [one for one in self._connections if self._chance.random() < DROPPED_SHARE]
        for one in struck:
            one.dropping = True
        await asyncio.sleep(seconds)
        self._close_all(struck)

    async def _connect(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        if self._refusing:
            near.transport.abort()
            return
        try:
            back, far = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            near.transport.abort()
            return
        connection = _Connection(near, far)
        self._connections.add(connection)
        for pump in (self._pump(connection, reader, far), self._pump(connection, back, near)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._delayed:
                    await asyncio.sleep(DELAY_SECONDS)
                if not connection.dropping:
                    sink.write(data)
                    await sink.drain()
        connection.close()
        self._connections.discard(connection)

    def _close_all(self, connections: list[_Connection]) -> None:
        for connection in connections:
            connection.close()
