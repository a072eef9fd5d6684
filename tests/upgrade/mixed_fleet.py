"""A fleet on this machine whose processes are each of one release or another, and a load that remembers what became of it."""

import asyncio
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.support.nats import embedded_nats
from tests.support.waiting import eventually

NOW = Path(sys.executable)
SPEED = 10.0
ENGINES = ("engine-1", "engine-2")
STOP_SECONDS_MAX = 40.0
READY_SECONDS_MAX = 20.0
PACKAGES = {"engine-sim": "engine_sim"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Process:
    name: str
    role: str
    arguments: list[str]
    port: int
    """Of its health page."""
    python: Path
    running: subprocess.Popen[bytes]


@dataclass
class MixedFleet:
    nats: str
    directory: Path
    session: aiohttp.ClientSession
    processes: dict[str, Process] = field(default_factory=dict)
    engine_ports: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    ingress_ports: dict[str, int] = field(default_factory=dict)
    readiness: object = None

    async def start_all(self, python: Path) -> None:
        """Engines are simulated by this release, whatever the others are."""
        for engine in ENGINES:
            http, events, replay = self.engine_ports[engine] = free_port(), free_port(), free_port()
            config = (
                '{"enable_kv_cache_events":true,"publisher":"zmq",'
                f'"endpoint":"tcp://127.0.0.1:{events}","replay_endpoint":"tcp://127.0.0.1:{replay}"}}'
            )
            config = config.replace("tcp://127.0.0.1", "tcp://*")
            self._spawn(engine, "engine-sim", NOW, http, ["--speed", f"{SPEED}", "--kv-events-config", config])
        for name in ("scheduler-1", "scheduler-2"):
            await self.start(name, python)
        for engine in ENGINES:
            await self.start(f"worker-{engine}", python)
        for name in ("ingress-1", "ingress-2", "recorder-1", "rebalancer-1"):
            await self.start(name, python)
        await eventually(self._fleet_is_whole, seconds=READY_SECONDS_MAX, what="engines that are ready")

    async def start(self, name: str, python: Path) -> None:
        role, _, rest = name.partition("-")
        port = free_port()
        arguments = ["--nats", self.nats, "--speed", f"{SPEED}"]
        if role == "worker":
            http, events, replay = self.engine_ports[rest]
            arguments += ["--instance", rest, "--engine-url", f"http://127.0.0.1:{http}"]
            arguments += [
                "--kv-endpoint",
                f"tcp://127.0.0.1:{events}",
                "--kv-replay-endpoint",
                f"tcp://127.0.0.1:{replay}",
            ]
            arguments += ["--state-directory", str(self.directory / "workers")]
        elif role == "ingress":
            api = self.ingress_ports.setdefault(name, free_port())
            arguments += ["--port", f"{api}", "--admin-port", f"{port}", "--name", name, "--lame-duck-seconds", "1"]
        elif role == "recorder":
            arguments += ["--archive-url", f"sqlite+aiosqlite:///{self.directory / 'archive.sqlite'}"]
        elif role == "scheduler":
            arguments += ["--checkpoint-seconds", "3"]
        self._spawn(name, role, python, port, arguments, own_port=role != "ingress")
        try:
            await eventually(lambda: self._is_ready(port), seconds=READY_SECONDS_MAX)
        except AssertionError as error:
            raise AssertionError(f"{name} is not ready: {self.readiness}") from error

    async def replace(self, name: str, python: Path) -> None:
        """As a rolling upgrade does: stop one, start the other release in its place, wait until it is ready."""
        await self.stop(name)
        await self.start(name, python)

    async def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.running.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.running.wait, STOP_SECONDS_MAX)
        assert code == 0, f"{name} ended with {code}: {self.log_of(name)[-2000:]}"

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.running.kill()
            process.running.wait()

    async def leader(self) -> str:
        """Name of the scheduler that leads; empty if none does."""
        for name, process in self.processes.items():
            if process.role == "scheduler" and await self.metric(name, "pointsman_leader") == 1.0:
                return name
        return ""

    async def metric(self, name: str, metric: str) -> float:
        async with self.session.get(f"http://127.0.0.1:{self.processes[name].port}/metrics") as answer:
            found = re.findall(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", await answer.text(), re.MULTILINE)
        return sum(map(float, found))

    def log_of(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _spawn(
        self, name: str, role: str, python: Path, port: int, arguments: list[str], *, own_port: bool = True
    ) -> None:
        module = f"pointsman_{PACKAGES.get(role, role)}.main"
        command = [str(python), "-c", f"from {module} import main; main()", *arguments]
        if own_port:
            command += ["--port", f"{port}"]
        with (self.directory / f"{name}.log").open("ab") as log:
            clean = {key: value for key, value in os.environ.items() if not key.startswith(("POINTSMAN_", "PYTHON"))}
            environment = clean | {"POINTSMAN_SECRET": "of the test"}
            running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.directory)
        self.processes[name] = Process(name, role, arguments, port, python, running)

    async def _is_ready(self, port: int) -> bool:
        try:
            async with self.session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                page = await answer.json()
                self.readiness = page
                return answer.status == 200 and not page["degraded"]
        except aiohttp.ClientError:
            return False

    async def _fleet_is_whole(self) -> bool:
        leader = await self.leader()
        return bool(leader) and await self.metric(leader, 'pointsman_engines{pool="default",status="ready"}') == len(
            ENGINES
        )


@dataclass
class Load:
    """So many chats a second, to the ingresses in turn; one that stops or takes no connection is passed over, as by a balancer."""

    fleet: MixedFleet
    rate: float
    answered: dict[str, str] = field(default_factory=dict)
    """Phase by id in the log."""
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By phase and how it ended."""
    phase: str = "begin"
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        for number in itertools.count():
            task = asyncio.create_task(self._one(number, self.phase))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(1 / self.rate)

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _one(self, number: int, phase: str) -> None:
        prompt = [7 + number % 8] * 640 + [1000 + number] * 32  # eight prefixes of ten blocks
        body = {"model": "pointsman-sim", "prompt": prompt, "max_tokens": 24, "stream": True}
        running = [port for name, port in self.fleet.ingress_ports.items() if name in self.fleet.processes]
        for port in running if number % 2 else reversed(running):
            try:
                async with self.fleet.session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                    text = (await answer.read()).decode()
                    whole = answer.status == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text
                    self.ends[phase, "whole" if whole else f"{answer.status}: {text[-200:]}"] += 1
                    if whole:
                        self.answered[answer.headers["x-pointsman-request-id"]] = phase
                    return
            except aiohttp.ClientConnectorError:
                continue
            except (aiohttp.ClientError, OSError) as error:
                self.ends[phase, repr(error)] += 1
                return
        self.ends[phase, "no ingress"] += 1


@asynccontextmanager
async def mixed_fleet(directory: Path, python: Path) -> AsyncIterator[MixedFleet]:
    """All of one release at first."""
    async with (
        embedded_nats(directory / "nats") as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session,
    ):
        fleet = MixedFleet(server.url, directory, session)
        try:
            await fleet.start_all(python)
            yield fleet
        finally:
            fleet.kill_all()


@asynccontextmanager
async def load_on(fleet: MixedFleet, rate: float) -> AsyncIterator[Load]:
    load = Load(fleet, rate)
    running = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        running.cancel()
        await load.finish()
