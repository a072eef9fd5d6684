"""Latency one at a time, throughput, and CPU time per request and per streamed chunk. Direct and gateway calls of the
same bytes alternate, so that noise affects both; latency is the median of paired differences."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from rich.progress import Progress

from pointsman_lab.gateway.connection import (
    Answer,
    Ask,
    BenchError,
    Connection,
    RefusedError,
    Target,
    connection,
    small_chat,
    stream,
    token_ids,
)
from pointsman_lab.proc import children, threads

WARM_UP_REQUESTS = 20
STREAM_TOKENS = 64
STREAMS_AT_ONCE = 8
STREAMS = 6 * STREAMS_AT_ONCE
WORK_REQUESTS_MIN = 200


@dataclass
class Added:
    direct_p50_ms: float
    gateway_p50_ms: float
    added_p50_ms: float
    added_p90_ms: float
    added_p99_ms: float
    requests: int
    elsewhere: int


@dataclass
class Work:
    cpu_us_per_request: float
    cpu_us_per_chunk: float = 0.0


@dataclass
class Figures:
    added: dict[str, Added] = field(default_factory=dict)
    requests_per_s: dict[str, float] = field(default_factory=dict)
    concurrency: int = 0
    work: dict[str, Work] = field(default_factory=dict)
    not_measured: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    """Bodies that another router does not take."""


@dataclass(frozen=True)
class Setup:
    """`engines`: server by instance name; `pids`: process by service; `may_refuse`: bodies, as another router."""

    gateway: Target
    engines: dict[str, Target]
    pids: dict[str, int]
    model: str
    requests: int
    concurrency: int
    may_refuse: bool = False


async def measure(setup: Setup) -> Figures:
    """Raises BenchError for an unexpected answer."""
    figures = Figures(concurrency=setup.concurrency)
    asks = [small_chat(setup.model), token_ids(setup.model)]
    with Progress(transient=True) as progress:
        task = progress.add_task("latency", total=len(asks) + 2 + 1)
        engine = await _same_engine(setup, asks[0])
        for ask in asks:
            try:
                figures.added[ask.name] = await _added(setup, ask)
            except RefusedError as refused:
                if not setup.may_refuse:
                    raise
                figures.refused[ask.name] = str(refused)
            progress.advance(task)
        progress.update(task, description=f"requests/s at concurrency {setup.concurrency}")
        for name, target in (("direct", engine), ("gateway", setup.gateway)):
            figures.requests_per_s[name] = await _throughput(target, asks[0], setup)
            progress.advance(task)
        progress.update(task, description="CPU time")
        await _measure_work(setup, asks[0], figures)
        progress.advance(task)
    return figures


async def _added(setup: Setup, ask: Ask) -> Added:
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
        raise BenchError("the gateway never used the engine that was called directly")
    return Added(
        direct_p50_ms=statistics.median(direct),
        gateway_p50_ms=statistics.median(gateway),
        added_p50_ms=statistics.median(added),
        added_p90_ms=added[int(len(added) * 0.9)],
        added_p99_ms=added[int(len(added) * 0.99)],
        requests=len(added),
        elsewhere=elsewhere,
    )


async def _timed(link: Connection, ask: Ask) -> tuple[float, Answer]:
    started = time.perf_counter()
    answer = await link.ask(ask)
    return (time.perf_counter() - started) * 1000, answer


async def _same_engine(setup: Setup, ask: Ask) -> Target:
    if len(setup.engines) == 1:
        return next(iter(setup.engines.values()))
    async with connection(setup.gateway) as link:
        used = [(await link.ask(ask)).header("x-pointsman-instance") for _ in range(3)]
    instance = used[-1]
    if instance not in setup.engines:
        raise BenchError(f"the gateway used {instance!r}, whose URL is not known")
    return setup.engines[instance]


async def _throughput(target: Target, ask: Ask, setup: Setup) -> float:
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


async def _cpu_of(setup: Setup, work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    before = {name: cpu_us(pid) for name, pid in setup.pids.items()}
    await work()
    return {name: cpu_us(pid) - before[name] for name, pid in setup.pids.items()}


async def _streams(setup: Setup, tokens: int) -> None:
    await _together(setup.gateway, stream(setup.model, tokens), STREAMS, STREAMS_AT_ONCE)


def cpu_us(pid: int) -> float:
    """CPU time of a process with its threads and children. Raises BenchError."""
    try:
        own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads(pid)) / 1000
        return own + sum(map(cpu_us, children(pid)))
    except (OSError, ValueError, IndexError) as error:
        raise BenchError(f"the CPU time of process {pid} cannot be read: {error}") from error
