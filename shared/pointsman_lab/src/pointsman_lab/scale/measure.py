"""One size of a pool: starts it, puts it under load, measures, kills its leader, starts it again, and folds the log."""

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.policies.policy_set import policy_set
from pointsman.ports import Link, LogEntry, StoreUnavailableError
from pointsman.primitives import PoolName, Sequence, WallSeconds
from pointsman.runtime.embedded_nats import EmbeddedNats, start_nats
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import DeploymentSettings
from pointsman.simulation.metrics import percentile
from pointsman.state.state import PoolSettings, State
from pointsman_lab.proc import children, cpu_seconds, memory_mb, threads
from pointsman_lab.scale.load import Answers, ScaleLoad
from pointsman_lab.scale.processes import Services, wait_seconds
from pointsman_lab.traffic import BLOCK_TOKENS

CHECKPOINT_SECONDS = 5.0
CHECKPOINT_SECONDS_MAX = 90.0
TAKE_OVER_SECONDS_MAX = 60.0
FLUSH_WALL_SECONDS = WallSeconds(60.0)
DECISION = "pointsman_decision_seconds"
ALL_SHARE = 0.25
"""Of the rate, while all processes run."""
ALONE = ("pointsman-scheduler", "--block-tokens", str(BLOCK_TOKENS), "--checkpoint-seconds", "0")
SCHEDULER = (*ALONE[:-1], str(CHECKPOINT_SECONDS))
"""With a checkpointer."""
FOLLOWERS = (
    ("recorder", "pointsman-recorder"),
    ("rebalancer", "pointsman-rebalancer", "--block-tokens", str(BLOCK_TOKENS)),
    ("scaler", "pointsman-scaler", "--block-tokens", str(BLOCK_TOKENS), "--max-instances", "1000"),
)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    instances: int
    rate: float
    seconds: float
    warm_seconds: float
    blocks: int


@dataclass
class Pool:
    options: ScaleOptions
    services: Services
    server: EmbeddedNats
    link: Link
    load: ScaleLoad
    clock: ScaledClock


async def measured(options: ScaleOptions) -> dict[str, Any]:
    async with _pool(options) as pool:
        async with asyncio.TaskGroup() as tasks:  # so that a load that fails ends the measurement
            running = tasks.create_task(pool.load.run())
            figures = await _figures(pool)
            running.cancel()
        await pool.link.log.flush(FLUSH_WALL_SECONDS)
        pool.services.close()
        return figures | await _fold(pool, *figures["sequences"])


async def _figures(pool: Pool) -> dict[str, Any]:
    """Decisions first, then what takes over, then all processes: few cores do not hold them at once."""
    options, load = pool.options, pool.load
    await load.full.wait()
    with _own_core(pool):
        await asyncio.sleep(options.warm_seconds)
        figures = await _steady(pool)
    await pool.services.start("standby", *SCHEDULER).ready()
    await _until_checkpoint(pool)
    figures["take_over_seconds"] = await _take_over(pool)
    figures["start_seconds"] = await _start_again(pool)
    load.rate = options.rate * ALL_SHARE
    await _start_followers(pool)
    await asyncio.sleep(options.warm_seconds)
    figures["with_followers"] = await _steady(pool)
    figures["memory_mb"] = {name: round(memory_mb(pid)) for name, pid in _processes(pool).items()}
    return figures


@contextmanager
def _own_core(pool: Pool) -> Iterator[None]:
    """The leader has the last core for itself, if there are several. All threads of a process count."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        others = cores - {max(cores)}
        _pin(pool.services.running["leader"].pid, {max(cores)})
        _pin(os.getpid(), others)
        _pin(pool.server.pid, others)
    try:
        yield
    finally:
        for pid in _processes(pool).values():
            _pin(pid, cores)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in threads(pid):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


@asynccontextmanager
async def _pool(options: ScaleOptions) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-scale-")))
        server = await start_nats(directory / "nats")
        stack.push_async_callback(server.stop)
        services = Services(server.url, directory)
        stack.callback(services.close)
        clock, settings = ScaledClock(), DeploymentSettings(nats=server.url)
        link = await stack.enter_async_context(
            open_link(settings, clock, HealthBoard(), name="lab", user=BusUser(BusRole.SCHEDULER))
        )
        await services.start("leader", *ALONE).ready()
        load = ScaleLoad(
            link, clock, PoolName("default"), instances=options.instances, rate=options.rate, blocks=options.blocks
        )
        yield Pool(options, services, server, link, load, clock)


async def _start_followers(pool: Pool) -> None:
    archive = ("--archive-url", f"sqlite+aiosqlite:///{pool.services.directory / 'archive.sqlite'}")
    for name, script, *more in FOLLOWERS:
        await pool.services.start(name, script, *more, *(archive if name == "recorder" else ())).ready()


async def _steady(pool: Pool) -> dict[str, Any]:
    options, leader, load = pool.options, pool.services.running["leader"], pool.load
    watched = _processes(pool)
    decided, before = await leader.histogram(DECISION), await pool.link.log.extent()
    cpu = {name: cpu_seconds(pid) for name, pid in watched.items()}
    waited_before = wait_seconds(leader.pid)
    load.answers, began = Answers(), time.perf_counter()
    await asyncio.sleep(options.seconds)
    seconds, answers = time.perf_counter() - began, load.answers
    after, decided_after = await pool.link.log.extent(), await leader.histogram(DECISION)
    decisions = {bound: value - decided.get(bound, 0.0) for bound, value in decided_after.items()}
    requests = answers.granted + answers.rejected
    written = after.bytes - before.bytes
    return {
        "instances": options.instances,
        "blocks": options.blocks,
        "cores": os.cpu_count(),
        "requests_a_second": load.rate,
        "decisions_a_second": round(requests / seconds, 1),
        "rejected": answers.rejected,
        "unanswered": answers.failed,
        "in_flight": load.in_flight,
        "sequences": (before.last, after.last),
        "decision_p50_ms": _quantile(decisions, 0.5),
        "decision_p99_ms": _quantile(decisions, 0.99),
        "leader_waits_percent": round(100 * (wait_seconds(leader.pid) - waited_before) / seconds, 1),
        "answer_p50_ms": _milliseconds(percentile(answers.seconds, 50)),
        "answer_p99_ms": _milliseconds(percentile(answers.seconds, 99)),
        "log_kb_a_second": round(written / seconds / 1e3, 1),
        "log_bytes_a_request": round(written / max(1, requests)),
        "cpu_ms_a_request": {
            name: round(1e3 * (cpu_seconds(pid) - cpu[name]) / max(1, requests), 3) for name, pid in watched.items()
        },
        "log_bytes_an_engine_and_second": round(written / seconds / options.instances),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def _processes(pool: Pool) -> dict[str, int]:
    """Pids by name."""
    found = {"instances and ingress": os.getpid(), "nats": pool.server.pid}
    for name, service in pool.services.running.items():
        found[name] = service.pid
        for child in children(service.pid):
            found[f"{name}'s checkpointer"] = child
    return found


async def _until_checkpoint(pool: Pool) -> None:
    async with asyncio.timeout(CHECKPOINT_SECONDS_MAX):
        while not await _checkpoints(pool):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.5)


async def _start_again(pool: Pool) -> float | None:
    """Starts what was killed, beside the new leader: seconds from the start of the process until it could lead. None: it
    found no checkpoint to start from."""
    running = pool.services.running
    running["leader"] = running.pop("standby")
    took = await pool.services.start("standby", *SCHEDULER).ready()
    return round(took, 2) if pool.services.said("standby", "checkpoint_restored") else None


async def _checkpoints(pool: Pool) -> int:
    try:
        return len(await pool.link.checkpoints.labels())
    except StoreUnavailableError:
        return 0


async def _take_over(pool: Pool) -> float | None:
    """From the death of the leader until the next one has granted a request. None: nobody led."""
    running = pool.services.running
    if await running["standby"].leads():  # on a busy machine the leader may have lost its lease
        running["leader"], running["standby"] = running["standby"], running["leader"]
    led = await running["leader"].leads()
    known = set(pool.load.answers.first_of_term)
    killed = pool.clock.wall()
    pool.services.kill("leader")
    if not led:
        return None
    async with asyncio.timeout(TAKE_OVER_SECONDS_MAX):
        while not (new := pool.load.answers.first_of_term.keys() - known):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    return round(float(pool.load.answers.first_of_term[min(new)] - killed), 2)


async def _fold(pool: Pool, first: Sequence, last: Sequence) -> dict[str, Any]:
    """Reads the whole log and folds it. Bytes by kind are payloads of the entries after `first`, up to `last`."""
    end = (await pool.link.log.extent()).last
    state = State(PoolSettings(block_tokens=BLOCK_TOKENS), policy_set().trackers())
    kinds: Counter[str] = Counter()
    entries: list[LogEntry] = []
    async for entry in pool.link.log.read(1):
        if isinstance(entry, LogEntry):
            entries.append(entry)
            if first < entry.sequence <= last:
                kinds[type(entry.event).__name__] += len(entry.payload)
            if entry.sequence >= end:
                break
    began = time.perf_counter()
    for entry in entries:
        state.apply_entry(LogEntry.read(entry.sequence, entry.subject, entry.payload))
    seconds = time.perf_counter() - began
    return {
        "fold_entries_a_second": round(len(entries) / seconds),
        "dead_letters": state.dead_letters.count,
        "bytes_by_kind": dict(kinds.most_common()),
    }


def _quantile(cumulative: dict[float, float], share: float) -> float | None:
    """Milliseconds, within the bucket as if evenly spread. None: beyond the last bound, or nothing was counted."""
    total = cumulative.get(float("inf"), 0.0)
    low, below = 0.0, 0.0
    for bound, count in sorted(cumulative.items()):
        if total and count >= share * total:
            if bound == float("inf"):
                return None
            return round(1e3 * (low + (bound - low) * (share * total - below) / (count - below)), 3)
        low, below = bound, count
    return None
