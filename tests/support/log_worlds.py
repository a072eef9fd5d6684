"""The worlds that the log's contract suite runs in: the memory broker, and a real nats-server.

A world gives clients of one pool and does to the log what a server's life does to it.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import StreamSettings, WindowSettings
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.permissions import ACCESS_BUCKET
from pointsman.contracts.subjects import stream_name
from pointsman.ports import Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.embedded_nats import EmbeddedNats, start_nats
from pointsman_lab.memory.log import MemoryBroker
from tests.support.waiting import eventually


@dataclass
class RememberingListener(LogListener):
    """Keeps what it was told."""

    losses: list[str] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    undecodables: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)
    stalled_now: bool = False
    forbidden_subjects: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @override
    def unreachable(self, reason: str) -> None:
        self.reasons.append(reason)

    @override
    def forbidden(self, operation: str, subject: str) -> None:
        self.forbidden_subjects.append((operation, subject))

    @override
    def log_missing(self, reason: str) -> None:
        self.missing.append(reason)

    @override
    def stalled(self, reason: str) -> None:
        self.stalls.append(reason)
        self.stalled_now = True

    @override
    def flowing(self) -> None:
        self.stalled_now = False

    @override
    def lost(self, count: int, reason: str) -> None:
        self.losses += [reason] * count

    @override
    def dropped(self, count: int, reason: str) -> None:
        self.drops.append(count)

    @override
    def reset(self, reason: str) -> None:
        self.resets.append(reason)

    @override
    def undecodable(self, subject: str, problem: str) -> None:
        self.undecodables.append(subject)

    @override
    def handler_failed(self, subject: str, error: Exception) -> None:
        self.failures.append(error)

    @override
    def trouble(self, what: str, reason: str) -> None:
        self.troubles.append(f"{what}: {reason}")


class LogWorld(ABC):
    def __init__(self, pool: PoolName) -> None:
        self.pool = pool
        self.listener = RememberingListener()

    @abstractmethod
    def client(
        self, name: str = "client", *, window_max: int = 1000, bytes_max: int = 64 * 1024**2
    ) -> AbstractAsyncContextManager[Link]: ...

    @abstractmethod
    async def stop(self) -> None:
        """The server crashes."""

    @abstractmethod
    async def start(self) -> None:
        """It comes back with what it had acknowledged."""

    @abstractmethod
    async def recreate(self, client: Link) -> None:
        """The log is deleted; the next write begins another."""

    @abstractmethod
    async def recreate_access(self, client: Link) -> None:
        """The store of keys and tenants, likewise."""

    @abstractmethod
    async def store_raw(self, client: Link, subject: str, payload: bytes) -> None: ...

    @abstractmethod
    async def remember(self) -> None: ...

    @abstractmethod
    async def go_back(self) -> None:
        """A power cut: everything stored since `remember` is gone. Leaves the server stopped."""


class MemoryWorld(LogWorld):
    def __init__(self, pool: PoolName) -> None:
        super().__init__(pool)
        self.broker = MemoryBroker(pool)
        self._remembered = 0

    @override
    @asynccontextmanager
    async def client(
        self, name: str = "client", *, window_max: int = 1000, bytes_max: int = 64 * 1024**2
    ) -> AsyncIterator[Link]:
        self.broker.bytes_max = bytes_max
        yield self.broker.client(ScaledClock(), name=name, listener=self.listener, window_max=window_max)

    @override
    async def stop(self) -> None:
        self.broker.disconnect()

    @override
    async def start(self) -> None:
        self.broker.reconnect()

    @override
    async def recreate(self, client: Link) -> None:
        self.broker.recreate()

    @override
    async def recreate_access(self, client: Link) -> None:
        self.broker.access.recreate()

    @override
    async def store_raw(self, client: Link, subject: str, payload: bytes) -> None:
        self.broker.store_raw(subject, payload)

    @override
    async def remember(self) -> None:
        self._remembered = self.broker.extent.last

    @override
    async def go_back(self) -> None:
        self.broker.disconnect()
        self.broker.lose_after(self._remembered)


class JetStreamWorld(LogWorld):
    """Several worlds share one server, each with a pool of its own."""

    def __init__(self, pool: PoolName, server: "SharedServer", *, reads_every: WallSeconds = WallSeconds(0.0)) -> None:
        super().__init__(pool)
        self._server = server
        self._reads_every = reads_every

    @override
    @asynccontextmanager
    async def client(
        self, name: str = "client", *, window_max: int = 1000, bytes_max: int = 64 * 1024**2
    ) -> AsyncIterator[Link]:
        async with jetstream.connect(
            self._server.url,
            self.pool,
            ScaledClock(),
            name=name,
            listener=self.listener,
            stream=StreamSettings(bytes_max=bytes_max),
            window=WindowSettings(events_max=window_max),
            reads_every=self._reads_every,
        ) as link:
            await eventually(lambda: link.commands.connected)
            yield link

    @override
    async def stop(self) -> None:
        await self._server.running.kill()

    @override
    async def start(self) -> None:
        await self._server.start()

    @override
    async def recreate(self, client: Link) -> None:
        await client.commands.request_bytes(
            f"$JS.API.STREAM.DELETE.{stream_name(self.pool)}", b"", timeout=WallSeconds(2)
        )

    @override
    async def recreate_access(self, client: Link) -> None:
        await client.commands.request_bytes(f"$JS.API.STREAM.DELETE.KV_{ACCESS_BUCKET}", b"", timeout=WallSeconds(2))

    @override
    async def store_raw(self, client: Link, subject: str, payload: bytes) -> None:
        await client.commands.request_bytes(subject, payload, timeout=WallSeconds(2))

    @override
    async def remember(self) -> None:
        await self._server.running.stop()
        shutil.copytree(self._server.directory, self._server.copy)
        await self._server.start()

    @override
    async def go_back(self) -> None:
        await self._server.running.kill()
        shutil.rmtree(self._server.directory)
        shutil.move(self._server.copy, self._server.directory)


class SharedServer:
    """A nats-server that can be stopped and comes back on the same port."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "store"
        self.copy = directory / "copy"
        self._running: EmbeddedNats | None = None
        self._port = 0

    @property
    def running(self) -> EmbeddedNats:
        assert self._running is not None
        return self._running

    @property
    def url(self) -> str:
        return self.running.url

    async def start(self) -> None:
        self._running = await start_nats(self.directory, self._port)
        self._port = int(self._running.url.rsplit(":", 1)[1])
