"""The processes of a pool on this machine: started, killed, and read from /proc and their metrics pages."""

import asyncio
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pointsman.adapters.child_process import end, spawn
from pointsman.adapters.tcp_ports import free_ports
from pointsman_cli.up.scripts import console_script

READY_SECONDS_MAX = 120.0
POLL_SECONDS = 0.02
HTTP_SECONDS = 2.0
END_SECONDS = 5.0


@dataclass
class Service:
    name: str
    process: "subprocess.Popen[bytes]"
    port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> float:
        """Seconds until /readyz answers 200."""
        began = time.perf_counter()
        async with asyncio.timeout(READY_SECONDS_MAX):
            while await self._page("/readyz") is None:  # noqa: ASYNC110 - a page cannot be awaited
                await asyncio.sleep(POLL_SECONDS)
        return time.perf_counter() - began

    async def histogram(self, name: str) -> dict[float, float]:
        """Cumulative counts by upper bound."""
        return {float(sample.labels["le"]): sample.value for sample in await self._samples(f"{name}_bucket")}

    async def leads(self) -> bool:
        return any(sample.value for sample in await self._samples("pointsman_leader"))

    async def _samples(self, name: str) -> list[Sample]:
        """Only these lines are parsed: the whole page of a large pool would keep the instances from their heartbeats."""
        page = await self._page("/metrics") or ""
        lines = "".join(line for line in page.splitlines(keepends=True) if line.startswith(f"{name}{{"))
        return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]

    async def _page(self, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=HTTP_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://127.0.0.1:{self.port}{path}") as answer,
            ):
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None


@dataclass
class Services:
    """Of one pool. `close` ends those that still run."""

    nats: str
    directory: Path
    running: dict[str, Service] = field(default_factory=dict)

    def start(self, name: str, script: str, *options: str) -> Service:
        (port,) = free_ports(1)
        command = [
            str(console_script(script)),
            "--nats",
            self.nats,
            "--port",
            str(port),
            "--log-level",
            "info",
            *options,
        ]
        service = Service(name, spawn(command, output=self.directory / f"{name}.log"), port)
        self.running[name] = service
        return service

    def kill(self, name: str) -> None:
        service = self.running.pop(name)
        end(service.process, signal.SIGKILL, END_SECONDS)

    def close(self) -> None:
        for service in self.running.values():
            end(service.process, signal.SIGTERM, END_SECONDS)
        self.running.clear()

    def said(self, name: str, what: str) -> bool:
        return what in (self.directory / f"{name}.log").read_text(errors="replace")


def wait_seconds(pid: int) -> float:
    """In which the main thread could have run and had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
