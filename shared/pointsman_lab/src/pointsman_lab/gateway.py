"""`pointsman-lab gateway`: what the ingress and the scheduler add to a direct call of the same engine.

Both ways are taken in turn within one run, with the same bytes over kept-alive connections of the same bare client, so
that a noisy machine disturbs both alike; the figure is the median of the paired differences. Prompts repeat, so that
the engine has them cached and its own time is small and equal on both ways.

Unless another fleet is named, a fresh one is started, with a simulated engine so fast that the cores do not fall
asleep while it computes: on cores that wake up for each request the same instructions take two to three times as
long, in the gateway, the engine and the client alike.

Wall times depend on the machine and on what else it does, instructions hardly do. Where `perf` may count, it counts
those that the ingress and the scheduler execute, less what they execute when idle; their CPU time always is.
"""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pointsman_cli.bench.comparison import FreshFleets, Variant
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_cli.output_file import OUTPUT_FILE, write_json

WARM_UP_REQUESTS = 20
TOKEN_IDS_BYTES = 40_000
TOKEN_IDS = range(10_000, 30_000)
FRESH_ENGINE_SPEED = 200.0
FRESH_POLICY = "dualmap"
SLOW_ENGINE_MS = 5.0
"""A direct call that takes longer lets the cores fall asleep."""

STREAM_TOKENS = 64
STREAMS_AT_ONCE = 8
STREAMS = 6 * STREAMS_AT_ONCE
WORK_REQUESTS_MIN = 200
IDLE_SECONDS = 2.0
REQUEST_SECONDS_MAX = 60.0
GENEROUS_SLO_MS = 10_000_000
"""So that nothing is refused at full load: what is measured is the way, not the engines."""


class BenchError(click.ClickException):
    """The measurement cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """A server to call, by its base URL."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Target":
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.hostname is None:
            message = f"{url!r} is no URL"
            raise BenchError(message)
        return cls(parts.hostname, parts.port or 80)


@dataclass(frozen=True)
class Ask:
    """One request, ready to be sent to any server."""

    name: str
    path: str
    body: bytes

    def to(self, target: Target) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self.body)}\r\nx-slo-ttft-ms: {GENEROUS_SLO_MS}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        for line in self.head.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode()
        return ""


@dataclass
class Added:
    """Milliseconds of one kind of body, direct and through the gateway."""

    direct_p50_ms: float
    gateway_p50_ms: float
    added_p50_ms: float
    added_p90_ms: float
    requests: int
    elsewhere: int
    """Requests that the gateway sent to another engine than the direct calls; they are left out."""


@dataclass
class Work:
    """What one process does. Instructions in thousands, user and kernel together; None where perf may not count."""

    cpu_us_per_request: float
    cpu_us_per_chunk: float = 0.0
    instructions_k_per_request: float | None = None
    instructions_k_per_chunk: float | None = None


@dataclass
class Figures:
    added: dict[str, Added] = field(default_factory=dict)
    requests_per_s: dict[str, float] = field(default_factory=dict)
    concurrency: int = 0
    work: dict[str, Work] = field(default_factory=dict)
    not_measured: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "added": {name: vars(added) for name, added in self.added.items()},
            "requests_per_s": self.requests_per_s,
            "concurrency": self.concurrency,
            "work": {name: vars(work) for name, work in self.work.items()},
            "not_measured": self.not_measured,
        }


ANY = ""
"""Stands for every instance, where only one engine was named."""


@dataclass(frozen=True)
class Setup:
    """What is measured. `engines`: server by instance name, or by ANY; `pids`: process by service."""

    gateway: Target
    engines: dict[str, Target]
    pids: dict[str, int]
    model: str
    requests: int
    concurrency: int


@click.command("gateway", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--url", help="Measure the gateway at this URL; with --engine-url and --model for one not started here.")
@click.option("--engine-url", help="The engine to call directly; by default the one that the gateway uses.")
@click.option("--ingress-pid", type=int, help="Process whose instructions are counted; by default found.")
@click.option("--scheduler-pid", type=int, help="Process whose instructions are counted; by default found.")
@click.option("--model", help="Model to ask for; by default the fleet's.")
@click.option("--nats", metavar="URL", help="Measure the fleet on this nats-server.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Measure the fleet of this directory.")
@click.option(
    "--requests", default=500, show_default=True, type=click.IntRange(10, 100_000), help="Pairs of each kind."
)
@click.option(
    "--concurrency", default=64, show_default=True, type=click.IntRange(1, 1024), help="Of the throughput run."
)
@click.option("--json", "out", type=OUTPUT_FILE, help="Write the figures here.")
def gateway_command(
    url: str | None,
    engine_url: str | None,
    ingress_pid: int | None,
    scheduler_pid: int | None,
    model: str | None,
    nats: str | None,
    data: Path | None,
    requests: int,
    concurrency: int,
    out: Path | None,
) -> None:
    """Measure what the gateway adds to a direct call of the same engine.

    \b
    Latency at concurrency 1 (a small chat, and 40 kB of token ids), requests a second at full load, and the CPU
    time and instructions per request and per streamed chunk of the ingress and of the scheduler.
      pointsman-lab gateway                      a fresh fleet with one engine that is fast enough not to matter
      pointsman-lab gateway --data .pointsman    the fleet of this directory
      pointsman-lab gateway --url http://HOST:8080 --engine-url http://HOST:8000 --model NAME
    """
    named = {role: pid for role, pid in (("ingress", ingress_pid), ("scheduler", scheduler_pid)) if pid}

    async def run() -> Figures:
        if url and engine_url and model:
            gateway, engine = Target.of(url), Target.of(engine_url)
            return await measure(Setup(gateway, {ANY: engine}, named, model, requests, concurrency))
        async with _fleet(nats, data, fresh=url is None) as fleet:
            setup = Setup(
                gateway=Target.of(url or fleet.ingress),
                engines={ANY: Target.of(engine_url)} if engine_url else _engines(fleet),
                pids=_pids(fleet) | named,
                model=model or fleet.model,
                requests=requests,
                concurrency=concurrency,
            )
            return await measure(setup)

    figures = asyncio.run(run())
    _print(figures)
    if out is not None:
        write_json(out, figures.as_json())


@asynccontextmanager
async def _fleet(nats: str | None, data: Path | None, *, fresh: bool) -> AsyncIterator[FleetFile]:
    """The fleet that was named, or a new one for as long as the context is open."""
    if nats or data or not fresh:
        yield find_fleet(nats, data)
        return
    async with FreshFleets(engines=1, speed=FRESH_ENGINE_SPEED).running(Variant(FRESH_POLICY)) as fleet:
        yield fleet


async def measure(setup: Setup, console: Console | None = None) -> Figures:
    """All figures, one after the other. Raises BenchError where a server does not answer as it should."""
    figures = Figures(concurrency=setup.concurrency)
    asks = [_small(setup.model), _token_ids(setup.model)]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("latency", total=len(asks) + 2 + 1)
        engine = await _same_engine(setup, asks[0])
        for ask in asks:
            figures.added[ask.name] = await _added(setup, ask)
            progress.advance(task)
        progress.update(task, description=f"requests/s at concurrency {setup.concurrency}")
        for name, target in (("direct", engine), ("gateway", setup.gateway)):
            figures.requests_per_s[name] = await _throughput(target, asks[0], setup)
            progress.advance(task)
        progress.update(task, description="CPU time and instructions")
        await _measure_work(setup, asks[0], figures)
        progress.advance(task)
    return figures


# Latency


async def _added(setup: Setup, ask: Ask) -> Added:
    """Direct and gateway in turn, and who goes first in turn too."""
    engine = await _same_engine(setup, ask)
    expected = ""
    direct: list[float] = []
    gateway: list[float] = []
    elsewhere = 0
    async with connection(engine) as to_engine, connection(setup.gateway) as to_gateway:
        for number in range(-WARM_UP_REQUESTS, setup.requests):
            first_direct = number % 2 == 0
            before = await _timed(to_engine, ask) if first_direct else None
            through, answer = await _timed(to_gateway, ask)
            straight, _ = before or await _timed(to_engine, ask)
            instance = answer.header("x-pointsman-instance")
            expected = expected or instance
            if number < 0:
                continue
            if instance != expected:
                elsewhere += 1
                continue
            direct.append(straight)
            gateway.append(through)
    added = sorted(g - d for g, d in zip(gateway, direct, strict=True))
    if not added:
        message = "the gateway never used the engine that was called directly"
        raise BenchError(message)
    return Added(
        direct_p50_ms=statistics.median(direct),
        gateway_p50_ms=statistics.median(gateway),
        added_p50_ms=statistics.median(added),
        added_p90_ms=added[int(len(added) * 0.9)],
        requests=len(added),
        elsewhere=elsewhere,
    )


async def _timed(link: "Connection", ask: Ask) -> tuple[float, Answer]:
    started = time.perf_counter()
    answer = await link.ask(ask)
    return (time.perf_counter() - started) * 1000, answer


async def _same_engine(setup: Setup, ask: Ask) -> Target:
    """The engine to which the gateway sends this prompt, once it has settled."""
    if ANY in setup.engines:
        return setup.engines[ANY]
    async with connection(setup.gateway) as link:
        used = [(await link.ask(ask)).header("x-pointsman-instance") for _ in range(3)]
    instance = used[-1]
    if instance not in setup.engines:
        message = f"the gateway used {instance!r}, whose URL is not known; name it with --engine-url"
        raise BenchError(message)
    return setup.engines[instance]


# Throughput


async def _throughput(target: Target, ask: Ask, setup: Setup) -> float:
    """Requests a second, every connection asking again as soon as it is answered."""
    total = max(setup.requests, 10 * setup.concurrency)
    await _together(target, ask, setup.concurrency, setup.concurrency)
    started = time.perf_counter()
    await _together(target, ask, total, setup.concurrency)
    return total / (time.perf_counter() - started)


async def _together(target: Target, ask: Ask, total: int, concurrency: int) -> None:
    turns = iter(range(total))
    await asyncio.gather(*(_in_turn(target, ask, turns) for _ in range(concurrency)))


async def _in_turn(target: Target, ask: Ask, turns: Iterator[int]) -> None:
    async with connection(target) as link:
        for _ in turns:
            await link.ask(ask)


# CPU time and instructions


async def _measure_work(setup: Setup, ask: Ask, figures: Figures) -> None:
    if not setup.pids:
        figures.not_measured = "work: no process ids known"
        return
    requests = max(WORK_REQUESTS_MIN, min(setup.requests, 1000))
    single = await _cpu_of(setup, lambda: _together(setup.gateway, ask, requests, 1))
    await _streams(setup, 1)
    many = await _cpu_of(setup, lambda: _streams(setup, STREAM_TOKENS))
    few = await _cpu_of(setup, lambda: _streams(setup, 1))
    for name in setup.pids:
        per_chunk = (many[name] - few[name]) / STREAMS / (STREAM_TOKENS - 1)
        figures.work[name] = Work(single[name] / requests, max(0.0, per_chunk))
    perf = shutil.which("perf")
    if perf is None:
        figures.not_measured = "instructions: perf is not installed"
        return
    try:
        for name, pid in setup.pids.items():
            await _count_instructions(_Perf(perf, pid), setup, ask, requests, figures.work[name])
    except PerfError as error:
        figures.not_measured = f"instructions: {error}"


async def _cpu_of(setup: Setup, work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """What each process computes during `work`, in microseconds."""
    before = {name: _cpu_us(pid) for name, pid in setup.pids.items()}
    await work()
    return {name: _cpu_us(pid) - before[name] for name, pid in setup.pids.items()}


def _cpu_us(pid: int) -> float:
    """CPU time so far of a process, its threads and its children (of an ingress with --processes), in microseconds.
    Raises BenchError."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1000
        return own + sum(map(_cpu_us, _children(pid)))
    except (OSError, ValueError, IndexError) as error:
        message = f"the CPU time of process {pid} cannot be read: {error}"
        raise BenchError(message) from error


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


async def _count_instructions(perf: "_Perf", setup: Setup, ask: Ask, requests: int, work: Work) -> None:
    """Per request with one at a time; per chunk as the difference between long and short streams."""
    idle = await perf.during(lambda: asyncio.sleep(IDLE_SECONDS)) / IDLE_SECONDS
    single = await _busy(perf, idle, lambda: _together(setup.gateway, ask, requests, 1))
    work.instructions_k_per_request = single / requests / 1000
    many = await _busy(perf, idle, lambda: _streams(setup, STREAM_TOKENS))
    few = await _busy(perf, idle, lambda: _streams(setup, 1))
    work.instructions_k_per_chunk = (many - few) / STREAMS / (STREAM_TOKENS - 1) / 1000


async def _streams(setup: Setup, tokens: int) -> None:
    await _together(setup.gateway, _stream(setup.model, tokens), STREAMS, STREAMS_AT_ONCE)


async def _busy(count: "_Perf", idle_per_s: float, work: Callable[[], Awaitable[None]]) -> float:
    """Instructions of `work`, without those that would have been executed anyway."""
    started = time.perf_counter()
    counted = await count.during(work)
    return counted - idle_per_s * (time.perf_counter() - started)


class PerfError(Exception):
    """perf cannot count here."""


class _Perf:
    """Counts the instructions of one process."""

    def __init__(self, perf: str, pid: int) -> None:
        self._perf = perf
        self._pid = pid

    async def during(self, work: Callable[[], Awaitable[None]]) -> float:
        """Raises PerfError."""
        arguments = ["stat", "-x", ",", "-e", "instructions:u,instructions:k", "-p", str(self._pid)]
        process = await asyncio.create_subprocess_exec(
            self._perf, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            await asyncio.sleep(0.2)
            await work()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            _, output = await process.communicate()
        return _counted(output.decode(errors="replace"))


def _counted(output: str) -> float:
    fields = [line.split(",") for line in output.splitlines() if "instructions" in line]
    numbers = [float(row[0]) for row in fields if row[0].strip().isdigit()]
    if len(numbers) < 2:
        said = fields[0][0].strip("<>") if fields else (output.strip().splitlines() or ["it said nothing"])[-1]
        message = f"perf may not count here ({said[:200]})"
        raise PerfError(message)
    return sum(numbers)


# A client that does as little as possible


class Connection:
    """One kept-alive connection. Answers are read whole; a stream until its last chunk."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer

    async def ask(self, ask: Ask) -> Answer:
        """Raises BenchError unless the answer is 200."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                self._writer.write(ask.to(self._target))
                answer = await self._answer()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            message = f"{self._target.host}:{self._target.port} did not answer: {str(error) or type(error).__name__}"
            raise BenchError(message) from error
        if answer.status != 200:
            message = f"{ask.path} answered {answer.status}: {answer.body[:300].decode(errors='replace')}"
            raise BenchError(message)
        return answer

    async def _answer(self) -> Answer:
        head = await self._reader.readuntil(b"\r\n\r\n")
        answer = Answer(int(head[9:12]), head, b"")
        length = answer.header("content-length")
        body = await self._reader.readexactly(int(length)) if length else await self._chunks()
        return Answer(answer.status, head, body)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(parts)


@asynccontextmanager
async def connection(target: Target) -> AsyncIterator[Connection]:
    """Raises BenchError when nobody listens there."""
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=4 * 1024 * 1024)
    except OSError as error:
        message = f"nothing answers at {target.host}:{target.port}: {error.strerror or error}"
        raise BenchError(message) from error
    try:
        yield Connection(target, reader, writer)
    finally:
        writer.close()


# What is asked, of whom


def _small(model: str) -> Ask:
    body = {"model": model, "messages": [{"role": "user", "content": "Say one word."}], "max_tokens": 1}
    return Ask("small", "/v1/chat/completions", json.dumps(body).encode())


def _token_ids(model: str) -> Ask:
    tokens = random.Random(40).choices(TOKEN_IDS, k=TOKEN_IDS_BYTES // 7)
    body = {"model": model, "prompt": tokens, "max_tokens": 1}
    return Ask("token_ids_40kb", "/v1/completions", json.dumps(body).encode())


def _stream(model: str, tokens: int) -> Ask:
    body = {"model": model, "prompt": [*TOKEN_IDS[:64]], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return Ask(f"stream_{tokens}", "/v1/completions", json.dumps(body).encode())


def _engines(fleet: FleetFile) -> dict[str, Target]:
    return {process.name: Target.of(process.url) for process in fleet.of_role("engine") if process.url}


def _pids(fleet: FleetFile) -> dict[str, int]:
    return {p.role: p.pid for p in fleet.processes if p.role in ("ingress", "scheduler") and p.pid}


def _print(figures: Figures) -> None:
    console = Console()
    latency = Table(
        "body", "direct p50", "gateway p50", "added p50", "added p90", "pairs", title="Latency, one at a time"
    )
    for name, added in figures.added.items():
        numbers = (added.direct_p50_ms, added.gateway_p50_ms, added.added_p50_ms, added.added_p90_ms)
        latency.add_row(name, *(f"{value:.2f} ms" for value in numbers), str(added.requests))
    console.print(latency)
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in figures.requests_per_s.items())
    console.print(f"requests/s at concurrency {figures.concurrency}: {rates}")
    if figures.work:
        columns = ("process", "CPU a request", "CPU a chunk", "instructions a request", "a chunk")
        work = Table(*columns, title="Work, per request and per streamed chunk")
        for name, done in figures.work.items():
            counts = (done.instructions_k_per_request, done.instructions_k_per_chunk)
            cpu = (done.cpu_us_per_request, done.cpu_us_per_chunk)
            work.add_row(name, *(f"{us:,.0f} us" for us in cpu), *map(_thousands, counts))
        console.print(work)
    if figures.not_measured:
        console.print(f"not measured: {figures.not_measured}")
    if any(added.direct_p50_ms > SLOW_ENGINE_MS for added in figures.added.values()):
        console.print(
            "This engine is slow enough for the cores to fall asleep between requests, which makes everything else "
            "slower too. Without --url, --nats and --data a fast one is measured."
        )


def _thousands(count: float | None) -> str:
    return "" if count is None else f"{count:,.0f} k"
