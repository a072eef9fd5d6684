"""A TCP load balancer in the test's own process: health checks on `/readyz`, new connections to whoever is well, in turn.

As haproxy with `inter` and `fall 2`, and with nothing of its retries but one: who cannot be connected to is passed over.
Connections that exist stay where they are, whatever a check says.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import count

import aiohttp

from pointsman_cli.discovery import FleetProcess
from pointsman_lab.background import background

CHECK_SECONDS = 0.2
CHECK_SECONDS_MAX = 2.0
FALL = 2
CHUNK_BYTES = 64 * 1024


class Backend:
    """One server, and whether it is in rotation."""

    def __init__(self, url: str, probes: str) -> None:
        self.probes = probes
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)
        self.well = False
        self.fell: int = 0
        """How often it left the rotation."""
        self._failed = 0

    def checked(self, *, well: bool) -> None:
        self._failed = 0 if well else self._failed + 1
        if well:
            self.well = True
        elif self._failed >= FALL and self.well:
            self.well = False
            self.fell += 1


class TestBalancer:
    """The balancer; `url` is where it listens."""

    __test__ = False

    def __init__(self, ingresses: Sequence[FleetProcess]) -> None:
        self.backends = [Backend(each.url, each.probes) for each in ingresses]
        self.url = ""
        self._turn = count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def check(self) -> None:
        """For ever."""
        timeout = aiohttp.ClientTimeout(total=CHECK_SECONDS_MAX)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                await asyncio.gather(*(self._check(session, backend) for backend in self.backends))
                await asyncio.sleep(CHECK_SECONDS)

    async def _check(self, session: aiohttp.ClientSession, backend: Backend) -> None:
        try:
            async with session.get(f"{backend.probes}/readyz") as answer:
                backend.checked(well=answer.status == 200)
        except (aiohttp.ClientError, OSError, TimeoutError):
            backend.checked(well=False)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, to its end."""
        for backend in self._in_turn():
            try:
                back, far = await asyncio.open_connection(backend.host, backend.port)
            except OSError:
                continue
            await asyncio.gather(_pump(reader, far), _pump(back, writer))
            return
        writer.transport.abort()

    def _in_turn(self) -> list[Backend]:
        first = next(self._turn)
        turned = [self.backends[(first + step) % len(self.backends)] for step in range(len(self.backends))]
        return [backend for backend in turned if backend.well]


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
    sink.close()


@contextlib.asynccontextmanager
async def balancer_before(*ingresses: FleetProcess) -> AsyncIterator[TestBalancer]:
    """A balancer before these ingresses, for as long as the context is open."""
    balancer = TestBalancer(ingresses)
    server = await asyncio.start_server(balancer.connect, "127.0.0.1", 0)
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with background(balancer.check()):
            yield balancer
    finally:
        server.close()
