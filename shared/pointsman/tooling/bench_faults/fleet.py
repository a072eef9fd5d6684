"""The fleet that is struck: `pointsman up` as people run it, or, where the network is to fail as well, the same behind
a proxy and with a nats-server of our own, which is started again when it dies, as `up` does with its own.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from pointsman.chassis.embedded_nats import EmbeddedNats, start_nats
from pointsman.chassis.settings import FleetSettings
from pointsman.tooling.bench.comparison import FreshFleets, Variant
from pointsman.tooling.bench_faults.network import Network
from pointsman.tooling.discovery import FleetFile, read_fleet_file
from pointsman.tooling.up.child import FIRST_RESTART_WAIT_SECONDS, POLL_SECONDS
from pointsman.tooling.up.ports import free_ports


class OwnNats:
    """A nats-server that is started again when it dies."""

    def __init__(self, server: EmbeddedNats, store: Path, port: int) -> None:
        self._store = store
        self._port = port
        self.server = server

    async def keep(self) -> None:
        """For ever. Raises NatsStartError."""
        while True:
            while self.server.running:  # noqa: ASYNC110 - waiting for a process without a thread is polling
                await asyncio.sleep(POLL_SECONDS)
            await asyncio.sleep(FIRST_RESTART_WAIT_SECONDS)
            self.server = await start_nats(self._store, self._port)


@dataclass(slots=True)
class Struck:
    """A running fleet. `nats` is where its server really is; `network` what lies between, if anything does."""

    data: Path
    nats: str
    own_nats: OwnNats | None = None
    network: Network | None = None

    @property
    def file(self) -> FleetFile:
        """What runs where at this moment."""
        found = read_fleet_file(self.data)
        assert found is not None, "it is there for as long as `up` runs"
        return found

    @property
    def settings(self) -> FleetSettings:
        """How to join its log, past the proxy."""
        return replace(self.file.settings(), nats=self.nats)

    def pids(self) -> dict[str, int]:
        """Every process that can be struck, by name."""
        pids = {process.name: process.pid for process in self.file.processes if process.pid}
        return pids | ({"nats": self.own_nats.server.pid} if self.own_nats else {})


@asynccontextmanager
async def struck_fleet(
    fleets: FreshFleets, policy: str, data: Path, *, network: bool, seed: int
) -> AsyncIterator[Struck]:
    """Start it and wait until it is ready; with `network`, behind a proxy. Raises FleetStartError, NatsStartError."""
    if not network:
        async with fleets.running(Variant(policy)) as fleet:
            yield Struck(data, fleet.nats)
        return
    port = free_ports(1)[0]
    store = data.parent / "nats"
    own = OwnNats(await start_nats(store, port), store, port)
    proxy = Network(port, chance=random.Random(seed))
    keeping = asyncio.create_task(own.keep())
    try:
        at = await proxy.open()
        behind = replace(fleets, arguments=[*fleets.arguments, "--nats", f"nats://127.0.0.1:{at}"])
        async with behind.running(Variant(policy)):
            yield Struck(data, f"nats://127.0.0.1:{port}", own, proxy)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await proxy.close()
        await own.server.stop()


def host_and_port(url: str) -> tuple[str, int]:
    """Where a `nats://` URL leads."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 4222
