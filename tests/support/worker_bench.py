"""A worker at work over a log in memory, beside an engine that a test speaks for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheGap,
    CacheSnapshot,
)
from pointsman.contracts.fleet import InstanceJoined
from pointsman.ports import Commands, EngineTarget
from pointsman.primitives import BlockKey, InstanceId, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_lab.memory.log import MemoryBroker
from pointsman_worker.engine_monitor import Engine
from pointsman_worker.service import WorkerService
from pointsman_worker.session import UNCONFIRMED_WALL_SECONDS, EventSource
from pointsman_worker.settings import WorkerSettings
from tests.support.fake_publisher import BLOCK, FakePublisher
from tests.support.memory_pool import POOL, LogView
from tests.support.services import ToldEngine, worker_over

INSTANCE = InstanceId("engine-1")
TARGET = EngineTarget(instance=INSTANCE, url="http://e:1")


class CacheView(LogView):
    def held(self) -> set[BlockKey]:
        """The instance's keys, by folding its events into a plain set; sequences must be dense in each epoch."""
        keys: set[BlockKey] = set()
        epoch, sequence = 0, 0
        for event in self.events:
            if isinstance(event, InstanceJoined) and event.epoch > epoch:
                keys, epoch, sequence = set(), event.epoch, 0
            if not isinstance(event, CacheEvent) or event.epoch != epoch or event.sequence <= sequence:
                continue
            assert event.sequence == sequence + 1
            sequence += 1
            match event:
                case BlocksStored():
                    keys.update(key for run in event.runs for key in unpack_keys(run.keys))
                case BlocksRemoved():
                    keys.difference_update(unpack_keys(event.keys))
                case CacheSnapshot():
                    keys = {key for run in event.runs for key in unpack_keys(run.keys)}
                case CacheCleared():
                    keys = set()
                case _:
                    assert isinstance(event, CacheGap)
        return keys


@dataclass
class WorkerBench:
    log: CacheView
    commands: Commands
    board: HealthBoard
    service: WorkerService
    task: "asyncio.Task[None]"


@asynccontextmanager
async def working(
    source: FakePublisher | EventSource | None,
    *,
    engine: Engine | None = None,
    broker: MemoryBroker | None = None,
    target: EngineTarget = TARGET,
    pauses: bool = False,
    unconfirmed_wall_seconds: WallSeconds = UNCONFIRMED_WALL_SECONDS,
    **settings: Any,
) -> AsyncIterator[WorkerBench]:
    """With `pauses` or a `state_directory` the worker pauses at the end, else it leaves."""
    clock, board, broker = ScaledClock(), HealthBoard(), broker or MemoryBroker(POOL)
    told = WorkerSettings(**{"block_tokens": 2 * BLOCK, "flush_ms": 2.0, "report_seconds": 0.1} | settings)
    service = worker_over(
        broker.client(clock, name="worker"),
        clock,
        engine or ToldEngine(),
        target,
        told,
        source_of(source) if isinstance(source, FakePublisher) else source,
        board=board,
        unconfirmed_wall_seconds=unconfirmed_wall_seconds,
    )
    task = asyncio.create_task(service.run())
    commands = broker.client(clock, name="test").commands
    try:
        yield WorkerBench(CacheView(broker), commands, board, service, task)
    finally:
        await (service.pause() if pauses or "state_directory" in settings else service.leave("test over"))
        await asyncio.gather(task, return_exceptions=True)


def source_of(publisher: FakePublisher) -> KvEventReader:
    return KvEventReader(KvEndpoint(publisher.endpoint, publisher.replay_endpoint), idle_check_seconds=0.2)
