"""A nats-server with the users of two pools, and raw clients of it, as an attacker would write one."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import Identity
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.permissions import ANY_INSTANCE, BusRole, BusUser, Permissions, permissions_of
from pointsman.contracts.subjects import covers
from pointsman.ports import Link
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import NAMED, Credentials
from pointsman.runtime.embedded_nats import EmbeddedNats, start_nats
from tests.support.waiting import eventually

POOLS = [PoolName("default"), PoolName("coder")]
WORKERS = [
    BusUser(BusRole.WORKER, name, pool)
    for name, pool in (("engine-1", POOLS[0]), ("engine-2", POOLS[0]), ("engine-3", POOLS[1]), (ANY_INSTANCE, POOLS[1]))
]
OPERATORS = ["alice", "bob"]
ADMIN = BusUser(BusRole.ADMIN, "root")
ROUTERS = [BusUser(BusRole.ROUTER, "other", POOLS[0]), BusUser(BusRole.ROUTER, "other", POOLS[1])]
USERS = [
    *(BusUser(role) for role in BusRole if role not in NAMED),
    *WORKERS,
    *ROUTERS,
    *(BusUser(BusRole.OPERATOR, name) for name in OPERATORS),
]
SETTLE_SECONDS = 0.2


def granted(user: BusUser) -> Permissions:
    return permissions_of(user, POOLS)


def beyond(rights: Iterable[str], subjects: Iterable[str]) -> set[str]:
    """Those of the subjects that no right covers, in lower case."""
    return {subject.lower() for subject in subjects if not any(covers(right, subject) for right in rights)}


@dataclass(slots=True)
class RawClient:
    """Says exactly what it is told to, and remembers what it was refused (in lower case, as the library has it)."""

    client: Client
    refused: set[str] = field(default_factory=set)
    heard: list[Msg] = field(default_factory=list)

    async def publish(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        await self.client.publish(subject, payload, reply, dict(headers) if headers else None)

    async def listen(self, subject: str) -> None:
        await self.client.subscribe(subject, cb=self._hear)

    async def refused_to_publish(self, subjects: Iterable[str]) -> set[str]:
        self.refused.clear()
        for subject in subjects:
            await self.publish(subject, b"{}" if "PURGE" in subject else b"x")
        await self.settled()
        return set(self.refused)

    async def refused_to_hear(self, subjects: Iterable[str]) -> set[str]:
        self.refused.clear()
        for subject in subjects:
            await self.listen(subject)
        await self.settled()
        return set(self.refused)

    async def settled(self) -> None:
        """Wait until the server has acted on everything."""
        await self.client.flush(5)
        await asyncio.sleep(SETTLE_SECONDS)
        await self.client.flush(5)

    async def call(self, subject: str, request: Any = None) -> Any:
        answer = await self.client.request(subject, b"" if request is None else json.dumps(request).encode(), timeout=3)
        return json.loads(answer.data)

    async def _hear(self, message: Msg) -> None:
        self.heard.append(message)


@dataclass(frozen=True, slots=True)
class LockedBus:
    server: EmbeddedNats
    credentials: Credentials
    identity: Identity = field(default_factory=Identity)
    """TLS files of clients that name none."""

    @property
    def url(self) -> str:
        return self.server.url

    @asynccontextmanager
    async def raw(self, user: BusUser | None) -> AsyncIterator[RawClient]:
        """None: nobody in particular."""
        options: dict[str, Any] = {}
        if user is not None:
            options = {"nkeys_seed": str(self.credentials.file(user)), "inbox_prefix": user.inbox.encode()}
        if self.identity.needs_tls:
            options["tls"] = self.identity.tls_context()

        async def on_error(error: Exception) -> None:
            text = str(error)
            if "permissions violation" in text:
                raw.refused.add(text.split('"')[1])

        client = Client()
        raw = RawClient(client)
        try:
            await client.connect(self.url, error_cb=on_error, allow_reconnect=False, connect_timeout=5, **options)
            yield raw
        finally:
            await client.close()

    @asynccontextmanager
    async def link(
        self, user: BusUser, pool: PoolName = POOLS[0], listener: LogListener | None = None
    ) -> AsyncIterator[Link]:
        """As our processes connect."""
        identity = replace(self.identity, credentials=str(self.credentials.file(user)))
        async with jetstream.connect(
            self.url, pool, ScaledClock(), name=user.inbox, user=user, identity=identity, listener=listener
        ) as link:
            await eventually(lambda: link.commands.connected)
            yield link


async def start_bus(directory: Path, *, tls: str = "", identity: Identity | None = None) -> LockedBus:
    """`tls`: of nats-server's configuration; `identity`: with which our clients answer it."""
    credentials = Credentials(directory / "credentials")
    credentials.make(POOLS, workers=WORKERS, operators=OPERATORS, routers=ROUTERS, admins=[ADMIN.name])
    server = await start_nats(directory / "nats", accounts=credentials.configuration() + tls)
    return LockedBus(server, credentials, identity or Identity())


@asynccontextmanager
async def locked_bus(directory: Path) -> AsyncIterator[LockedBus]:
    bus = await start_bus(directory)
    try:
        yield bus
    finally:
        await bus.server.stop()
