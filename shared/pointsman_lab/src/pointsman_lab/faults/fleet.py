"""The fleet under test: `pointsman up`, or, for network faults and several log servers, `pointsman up` joined to our
own nats-servers, which are restarted when they die."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pointsman.adapters.backoff import FIRST_RESTART_WAIT_SECONDS
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.permissions import JETSTREAM_API, SERVICE_API
from pointsman.contracts.subjects import stream_name
from pointsman.ports import CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import EngineSeconds, PoolName, WallSeconds
from pointsman.runtime.embedded_nats import ClusterNode, EmbeddedNats, start_nats
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.bench.fresh_fleet import FreshFleet
from pointsman_cli.discovery import FleetFile, read_fleet_file
from pointsman_cli.up.child import POLL_SECONDS
from pointsman_lab.faults.network import Network

ASK_SECONDS_MAX = 1.0
NATS = "nats"


@dataclass(slots=True)
class OwnNats:
    name: str
    store: Path
    port: int
    cluster: ClusterNode | None
    server: EmbeddedNats | None = None
    down_until: float = 0.0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Raises NatsStartError."""
        self.server = await start_nats(self.store, self.port, cluster=self.cluster)

    async def keep(self) -> None:
        """Runs until cancelled. Raises NatsStartError."""
        while True:
            while self.server is None or self.server.running:  # noqa: ASYNC110 - waiting for a process without a thread
                await asyncio.sleep(POLL_SECONDS)
            await asyncio.sleep(max(FIRST_RESTART_WAIT_SECONDS, self.down_until - time.monotonic()))
            await self.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()


@dataclass(slots=True)
class FleetUnderTest:
    """`nats`: address of the log; `network`: proxy before it, if any."""

    data: Path
    nats: str
    servers: Sequence[OwnNats] = ()
    network: Network | None = None

    @property
    def file(self) -> FleetFile:
        found = read_fleet_file(self.data)
        assert found is not None, "it is there for as long as `up` runs"
        return found

    @property
    def settings(self) -> FleetSettings:
        return replace(self.file.settings(), nats=self.nats, log_replicas=max(1, len(self.servers)))

    def pids(self) -> dict[str, int]:
        own = {one.name: one.server.pid for one in self.servers if one.server is not None}
        return {process.name: process.pid for process in self.file.processes if process.pid} | own

    async def nats_down(self, name: str, seconds: EngineSeconds) -> None:
        """Kills one of our own servers, and keeps it down."""
        (struck,) = [one for one in self.servers if one.name == name]
        assert struck.server is not None, "it was started with the fleet"
        struck.down_until = time.monotonic() + seconds
        await struck.server.kill()
        await asyncio.sleep(struck.down_until - time.monotonic())

    async def nats_victim(self, link: Link) -> str:
        return NATS if len(self.servers) < 2 else await self.log_leader(link)

    async def log_leader(self, link: Link) -> str:
        """The name of the nats-server that leads the log's replicas. Waits for one."""
        api = SERVICE_API if self.settings.nats_credentials else JETSTREAM_API
        subject = f"{api}STREAM.INFO.{stream_name(PoolName(self.file.pool))}"
        while True:
            try:
                answer = await link.commands.request_bytes(subject, b"", timeout=WallSeconds(ASK_SECONDS_MAX))
            except (NoResponderError, CommandTimeoutError):
                await asyncio.sleep(POLL_SECONDS)
                continue
            leader = msgspec.json.decode(answer).get("cluster", {}).get("leader", "")
            if leader:
                return str(leader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`own`: our own nats-server even when it is a single one."""

    fleet: FreshFleet
    servers: int = 1
    network: bool = False
    own: bool = False
    seed: int = 0

    @property
    def own_servers(self) -> bool:
        return self.own or self.network or self.servers > 1


@asynccontextmanager
async def start_fleet(shape: Shape, directory: Path) -> AsyncIterator[FleetUnderTest]:
    """Starts the fleet below `directory` and waits until it is ready. Raises FleetStartError, NatsStartError."""
    data, fresh = directory / "data", replace(shape.fleet, directory=directory)
    async with AsyncExitStack() as stack:
        if not shape.own_servers:
            fleet = await stack.enter_async_context(fresh.running())
            yield FleetUnderTest(data, fleet.nats)
            return
        servers = await _servers(shape.servers, directory, stack)
        urls = ",".join(one.url for one in servers)
        struck = FleetUnderTest(data, urls, servers)
        if shape.network:
            struck.network = Network(servers[0].port, chance=random.Random(shape.seed))
            stack.push_async_callback(struck.network.close)
            urls = f"nats://127.0.0.1:{await struck.network.open()}"
        joined = replace(
            fresh,
            arguments=[*fresh.arguments, "--nats", urls],
            environment={"POINTSMAN_LOG_REPLICAS": str(shape.servers)},
        )
        await stack.enter_async_context(joined.running())
        yield struck


async def _servers(count: int, directory: Path, stack: AsyncExitStack) -> list[OwnNats]:
    names = [NATS] if count == 1 else [f"{NATS}-{number}" for number in range(1, count + 1)]
    (*ports,) = free_ports(2 * count)
    routes = tuple(ports[count:])
    servers = [
        OwnNats(name, directory / name, port, ClusterNode(name=name, port=route, ports=routes) if count > 1 else None)
        for name, port, route in zip(names, ports, routes, strict=False)
    ]
    for server in servers:
        stack.push_async_callback(server.stop)
        await server.start()
    for server in servers:
        keeping = asyncio.create_task(server.keep())
        stack.push_async_callback(asyncio.wait, [keeping], timeout=1)
        stack.callback(keeping.cancel)
    return servers
