"""Other routers, from PyPI. In: their environment (`make routers`), the engine. Out: each one running in front of it with
its cache-aware policy and else its defaults."""

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pointsman.adapters.child_process import end, spawn
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports
from pointsman_lab.gateway.connection import BenchError, Target, connection, small_chat

COMMANDS = {"smg": ("smg", "launch"), "sglang-router": ("sglang-router", "launch"), "vllm-router": ("vllm-router",)}
START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 5.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Router:
    target: Target
    pid: int


@asynccontextmanager
async def running(
    names: Sequence[str], environment: Path, engine: Target, model: str
) -> AsyncIterator[dict[str, Router]]:
    """Raises BenchError if one is not installed or does not start."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-routers-")))
        yield {
            name: await stack.enter_async_context(_running(name, environment, directory, engine, model))
            for name in names
        }


@asynccontextmanager
async def _running(name: str, environment: Path, directory: Path, engine: Target, model: str) -> AsyncIterator[Router]:
    program, *rest = COMMANDS[name]
    script = environment / "bin" / program
    if not script.exists():
        raise BenchError(f"{name} is not installed in {environment}; `make routers` installs it")
    port, metrics_port = free_ports(2)
    flags = {
        "worker-urls": f"http://{engine.host}:{engine.port}",
        "host": LOOPBACK,
        "port": port,
        "prometheus-port": metrics_port,
        "policy": "cache_aware",
    }
    output = directory / f"{name}.log"
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    process = spawn([str(script), *rest, *arguments], output=output)
    try:
        target = Target(LOOPBACK, port)
        await _ready(name, process, target, model, output)
        yield Router(target, process.pid)
    finally:
        await asyncio.to_thread(end, process, signal.SIGTERM, STOP_SECONDS_MAX)


async def _ready(name: str, process: "subprocess.Popen[bytes]", target: Target, model: str, output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            async with connection(target) as link:
                await link.ask(small_chat(model))
        except BenchError:  # not listening, or it does not know its engine yet
            await asyncio.sleep(POLL_SECONDS)
        else:
            return
    said = await asyncio.to_thread(output.read_text, errors="replace")
    raise BenchError(f"{name} did not become ready: {said[-1000:]}")
