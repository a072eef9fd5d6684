"""haproxy in front of the fleet's ingresses, configured as in docs/ingress.md, and a record of its rotation. haproxy
is taken from PATH."""

import asyncio
import csv
import io
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import click

from pointsman.adapters.child_process import spawn
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports
from pointsman.primitives import EngineSeconds
from pointsman_cli.discovery import FleetProcess
from pointsman_lab.background import background

START_SECONDS_MAX = 10.0
LOOK_SECONDS = 0.2
BACKEND = "pointsman"
OUTPUT_SHOWN_MAX = 2000
CONFIG = """\
defaults
    mode http
    timeout connect 2s
    timeout client 660s             # silence of either side: longer than the request timeout of an ingress
    timeout server 660s
    timeout http-request 10s        # until the whole head of a request is there
    timeout http-keep-alive 60s     # idle connections: shorter than the --keep-alive-seconds of an ingress
    timeout check 2s
    option http-no-delay            # each chunk of a stream at once
    option srvtcpka                 # an ingress whose host is gone: its streams end after 11 s, not after 660
    srvtcpka-idle 5s
    srvtcpka-intvl 2s
    srvtcpka-cnt 3
    option redispatch 1             # who cannot be connected to: try another
    retries 3
    retry-on conn-failure empty-response
    http-reuse safe

frontend openai
    bind {bind}
    http-request disable-l7-retry unless METH_GET   # a POST is sent again only where the connection failed
    default_backend pointsman

backend pointsman
    balance leastconn
    option httpchk
    http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host pointsman
    http-check expect status 200
    default-server check inter 1s fall 2 rise 1 tcp-ut 11s   # likewise, for a request that is not acknowledged
{servers}
"""
SOCKET = """\
global
    maxconn 4000
    stats socket {socket} mode 600 level user

"""


def haproxy_config(bind: str, servers: Sequence[tuple[str, str, int]]) -> str:
    """`servers`: name, address, and port of the health check."""
    lines = "\n".join(f"    server {name} {address} port {port}" for name, address, port in servers)
    return CONFIG.format(bind=bind, servers=lines)


class NoBalancerError(click.ClickException):
    """haproxy is missing or does not start."""


@dataclass(slots=True)
class Balancer:
    """`changes`: when (monotonic clock) a server entered or left the rotation."""

    url: str
    socket: Path
    rotation: dict[str, bool] = field(default_factory=dict)
    changes: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return bool(self.rotation) and all(self.rotation.values())

    def out_of_rotation(self, begin: float, end: float) -> dict[str, EngineSeconds]:
        """Seconds out of rotation between two moments, by server; without those that never were."""
        found = {}
        for server, changes in self.changes.items():
            spans = zip(changes, [*(at for at, _ in changes[1:]), end], strict=True)
            seconds = sum(max(0.0, min(until, end) - max(at, begin)) for (at, up), until in spans if not up)
            if seconds > 0:
                found[server] = seconds
        return found

    async def watch(self) -> None:
        while True:
            with suppress(OSError):
                self._take_in(await _statistics(self.socket))
            await asyncio.sleep(LOOK_SECONDS)

    def _take_in(self, page: str) -> None:
        now = time.monotonic()
        for row in csv.DictReader(io.StringIO(page.removeprefix("# "))):
            if row["pxname"] != BACKEND:
                continue
            name = row["svname"]
            if name == "BACKEND":
                self.counts = {"retries": int(row["wretr"] or 0), "redispatches": int(row["wredis"] or 0)}
                continue
            up = row["status"].startswith("UP")
            if self.rotation.get(name) is not up:
                self.rotation[name] = up
                self.changes[name].append((now, up))


@asynccontextmanager
async def run_haproxy(ingresses: Sequence[FleetProcess]) -> AsyncIterator[Balancer]:
    """haproxy before these, from when all are in rotation. Raises NoBalancerError."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/sbin")
    if program is None:
        raise NoBalancerError("there is no haproxy here; install it (Debian: apt-get install haproxy)")
    servers = [(each.name, urlsplit(each.url).netloc, urlsplit(each.probes).port or 0) for each in ingresses]
    with tempfile.TemporaryDirectory(prefix="pm-haproxy-") as place:
        bind = f"{LOOPBACK}:{free_ports(1)[0]}"
        balancer = Balancer(f"http://{bind}", Path(place) / "stats")
        config, output = Path(place) / "haproxy.cfg", Path(place) / "haproxy.log"
        config.write_text(SOCKET.format(socket=balancer.socket) + haproxy_config(bind, servers))
        process = spawn([program, "-db", "-f", str(config)], output=output)
        try:
            async with background(balancer.watch()):
                await _whole(process, balancer, output)
                yield balancer
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def _whole(process: "subprocess.Popen[bytes]", balancer: Balancer, output: Path) -> None:
    """Raises NoBalancerError when a server stays out of rotation."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not balancer.whole:
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoBalancerError(f"haproxy has no whole rotation ({balancer.rotation}):\n{_end_of(output)}")
        await asyncio.sleep(LOOK_SECONDS)


def _end_of(output: Path) -> str:
    return output.read_text(errors="replace")[-OUTPUT_SHOWN_MAX:]


async def _statistics(socket: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(b"show stat\n")
        return (await reader.read()).decode()
    finally:
        writer.close()
