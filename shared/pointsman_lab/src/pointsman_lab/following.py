"""`pointsman-lab following`: CPU, memory and punctuality of one worker that follows N engines, beside N workers. The engines
are headless: KV events and replay over ZMQ, HTTP answers of vLLM's size, no model. Figures are of the workers' processes,
read from /proc; all write to one real nats-server."""

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from rich.console import Console

from pointsman.adapters.child_process import spawn
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Link, LogEntry
from pointsman.primitives import InstanceId
from pointsman.runtime.embedded_nats import start_nats
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.settings import DeploymentSettings
from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.options import CONTEXT, COUNT, POSITIVE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table
from pointsman_cli.up.scripts import console_script
from pointsman_lab.background import background
from pointsman_lab.proc import cpu_seconds, memory_mb, open_files, threads

BLOCK_TOKENS = 16
BLOCKS_A_BATCH = 4
HELD_BLOCKS = 2_000
BUFFER_BATCHES = 10_000
METRICS_BYTES = 60_000
"""Of vLLM's page for one rank."""
START_SECONDS_MAX = 300.0
SETTLE_SECONDS = 5.0
PAGE = (
    'vllm:num_requests_waiting{engine="0"} 0.0\nvllm:num_requests_running{engine="0"} 8.0\n'
    f'vllm:kv_cache_usage_perc{{engine="0"}} 0.5\nvllm:cache_config_info{{block_size="{BLOCK_TOKENS}",engine="0",'
    f'num_gpu_blocks="{4 * HELD_BLOCKS}"}} 1.0\n'
)
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32_768}]}


class HeadlessEngine:
    """Stores random blocks in live batches and removes the oldest."""

    def __init__(self, context: zmq.asyncio.Context, chance: Random) -> None:
        self._chance = chance
        self._publisher, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.kv, self.replay = (_bound(socket) for socket in (self._publisher, self._router))
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._held: deque[list[int]] = deque()
        self._sequence = 0

    @property
    def blocks(self) -> int:
        return BLOCKS_A_BATCH * len(self._held)

    async def publish(self) -> None:
        hashes = [self._chance.getrandbits(63) for _ in range(BLOCKS_A_BATCH)]
        tokens = [self._chance.getrandbits(16) for _ in range(BLOCKS_A_BATCH * BLOCK_TOKENS)]
        stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens,
                  "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU"}  # fmt: skip
        events: list[Any] = [stored]
        self._held.append(hashes)
        if self.blocks > HELD_BLOCKS:
            events.append({"type": "BlockRemoved", "block_hashes": self._held.popleft(), "medium": "GPU"})
        payload = msgspec.msgpack.encode([0.0, events, 0])
        self._buffer.append((self._sequence, payload))
        await self._publisher.send_multipart((b"kv", self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    async def answer_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            for sequence, payload in list(self._buffer):
                if sequence >= int.from_bytes(start, "big"):
                    await self._router.send_multipart((client, b"", b"kv", sequence.to_bytes(8, "big"), payload))
            await self._router.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))


@dataclass
class Bench:
    engines: list[HeadlessEngine]
    urls: list[str]
    link: Link
    nats: str
    directory: Path
    reports: dict[InstanceId, list[InstanceReported]] = field(default_factory=dict)
    sent: int = 0

    async def follow_log(self) -> None:
        async for entry in self.link.log.read(1):
            if isinstance(entry, LogEntry) and isinstance(entry.event, InstanceReported):
                self.reports.setdefault(entry.event.instance, []).append(entry.event)

    async def publish(self, batches_a_second: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            engine = self.engines[self.sent % len(self.engines)]
            await engine.publish()
            self.sent += 1
            ahead = began + self.sent / (batches_a_second * len(self.engines)) - loop.time()
            await asyncio.sleep(max(0.0, ahead))

    def serving(self) -> int:
        return sum(reports[-1].serving for reports in self.reports.values())


@click.command("following", context_settings=CONTEXT)
@click.option("--engines", type=COUNT, default=64, show_default=True, help="Engines to follow.")
@click.option("--seconds", type=POSITIVE, default=30.0, show_default=True, help="Seconds to measure, for each way.")
@click.option(
    "--batches", type=POSITIVE, default=10.0, show_default=True, help="Batches of KV events a second and engine."
)
@out_option
def following_command(engines: int, seconds: float, batches: float, out: Path | None) -> None:
    """Measure one worker that follows many engines, beside a worker for each.

    \b
      pointsman-lab following                                64 engines, about 3 minutes on two cores
      pointsman-lab following --engines 8 --seconds 10 --out following.json
    """
    configure_logging("error", "text")
    figures = asyncio.run(_measured(engines, seconds, batches, out))
    made = table("", ">one worker", ">a worker each", title=f"{engines} engines, {batches:g} batches/s each")
    for name in figures["one"]:
        made.add_row(name.replace("_", " "), *(f"{figures[way][name]:,}" for way in ("one", "each")))
    Console().print(made)


async def _measured(count: int, seconds: float, batches: float, out: Path | None) -> dict[str, Any]:
    raised_open_files()
    found: dict[str, Any] = {"engines": count, "seconds": seconds, "batches_a_second_and_engine": batches}
    for way in ("one", "each"):
        async with _bench(count, batches) as bench:
            commands = _one_worker(bench) if way == "one" else _workers(bench)
            with _running(commands, bench) as pids:
                found[way] = await _figures(bench, pids, seconds)
        if out:
            write_json(out, found)
    return found


@asynccontextmanager
async def _bench(count: int, batches: float) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-following-")))
        server = await start_nats(directory / "nats")
        stack.push_async_callback(server.stop)
        user, settings = BusUser(BusRole.SCHEDULER), DeploymentSettings(nats=server.url)
        link = await stack.enter_async_context(open_link(settings, ScaledClock(), HealthBoard(), name="lab", user=user))
        context = stack.enter_context(zmq.asyncio.Context())
        stack.callback(context.destroy, linger=0)
        context.set(zmq.MAX_SOCKETS, 16_384)
        engines = [HeadlessEngine(context, Random(number)) for number in range(count)]
        urls = await _serve_http(stack, count)
        bench = Bench(engines, urls, link, server.url, directory)
        for _ in range(HELD_BLOCKS // BLOCKS_A_BATCH):
            for engine in engines:
                await engine.publish()
        replays = (engine.answer_replays() for engine in engines)
        async with background(bench.follow_log(), bench.publish(batches), *replays):
            yield bench


async def _serve_http(stack: AsyncExitStack, count: int) -> list[str]:
    page = PAGE + "".join(f'vllm:other_metric_total{{engine="0",le="{n}"}} {n}.0\n' for n in range(METRICS_BYTES // 46))

    async def text(request: web.Request) -> web.Response:
        return web.Response(text=page if request.path == "/metrics" else "")

    async def models(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    app = web.Application()
    app.router.add_get("/health", text)
    app.router.add_get("/metrics", text)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    for _ in range(count):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    return [f"http://127.0.0.1:{address[1]}" for address in runner.addresses]


def _common(bench: Bench) -> list[str]:
    return [str(console_script("pointsman-worker")), "--nats", bench.nats, "--block-tokens", str(BLOCK_TOKENS)]


def _one_worker(bench: Bench) -> list[list[str]]:
    tables = [
        f'[[engine]]\nurl = "{url}"\nkv_endpoint = "{engine.kv}"\nkv_replay_endpoint = "{engine.replay}"\n'
        for url, engine in zip(bench.urls, bench.engines, strict=True)
    ]
    file = bench.directory / "engines.toml"
    file.write_text("".join(tables))
    return [[*_common(bench), "--discover", f"file:{file}"]]


def _workers(bench: Bench) -> list[list[str]]:
    return [
        [*_common(bench), "--engine-url", url, "--kv-endpoint", engine.kv, "--kv-replay-endpoint", engine.replay]
        for url, engine in zip(bench.urls, bench.engines, strict=True)
    ]


@contextmanager
def _running(commands: Sequence[Sequence[str]], bench: Bench) -> Iterator[list[int]]:
    processes = [spawn(command, output=bench.directory / "workers.log") for command in commands]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


async def _figures(bench: Bench, pids: Sequence[int], seconds: float) -> dict[str, float]:
    count = len(bench.engines)
    async with asyncio.timeout(START_SECONDS_MAX):
        while bench.serving() < count:  # noqa: ASYNC110 - the log has no event for it
            await asyncio.sleep(0.2)
    starting = sum(map(cpu_seconds, pids))
    await asyncio.sleep(SETTLE_SECONDS)
    bench.reports.clear()
    before, sent, began = sum(map(cpu_seconds, pids)), bench.sent, asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    seconds = asyncio.get_running_loop().time() - began
    cpu, batches = sum(map(cpu_seconds, pids)) - before, (bench.sent - sent) / seconds
    gaps = sorted(later.at - earlier.at for reports in bench.reports.values() for earlier, later in pairwise(reports))
    exact = sum(reports[-1].serving and reports[-1].blocks <= HELD_BLOCKS + 1 for reports in bench.reports.values())
    return {
        "processes": len(pids),
        "batches_a_second": round(batches),
        "cpu_percent_of_a_core": round(100 * cpu / seconds, 1),
        "cpu_seconds_to_start": round(starting, 1),
        "memory_mb": round(sum(memory_mb(pid, "Pss") for pid in pids)),
        "resident_mb": round(sum(map(memory_mb, pids))),
        "threads": sum(len(threads(pid)) for pid in pids),
        "open_files": sum(map(open_files, pids)),
        "engines_followed": exact,
        "report_gap_p50_s": round(gaps[len(gaps) // 2], 2),
        "report_gap_max_s": round(gaps[-1], 2),
    }


def _bound(socket: zmq.asyncio.Socket) -> str:
    socket.set_hwm(0)
    socket.bind("tcp://127.0.0.1:*")
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
