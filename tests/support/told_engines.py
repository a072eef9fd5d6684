"""A worker that follows the engines which a test names, over a log in memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.fleet import InstanceJoined, InstanceReported
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.state.state import PoolSettings, State
from pointsman_lab.memory.log import MemoryBroker
from pointsman_worker.engine_fleet import EngineFleet
from pointsman_worker.followed_engine import WorkerContext
from pointsman_worker.session import EventSource
from pointsman_worker.settings import WorkerSettings
from tests.support.fake_publisher import BLOCK, FakePublisher
from tests.support.memory_pool import POOL, LogView
from tests.support.services import ToldEngine


class ToldEngines(EngineDiscovery):
    """A source whose list a test sets."""

    def __init__(self, *targets: EngineTarget, name: str = "told") -> None:
        self.name = name
        self.problem = ""
        self.failure: Exception | None = None
        self._list = list(targets)
        self._changed = asyncio.Event()

    def tell(self, *targets: EngineTarget) -> None:
        self._list = list(targets)
        self._changed.set()

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        while True:
            self._changed.clear()
            yield list(self._list)
            await self._changed.wait()
            if self.failure is not None:
                raise self.failure


@dataclass
class FollowingWorker:
    log: LogView
    board: HealthBoard
    fleet: EngineFleet
    engines: dict[str, ToldEngine]
    task: asyncio.Task[None]

    def last_report(self, instance: str) -> InstanceReported | None:
        return next(iter(self.log.of(InstanceReported, instance)[::-1]), None)

    def serves(self, instance: str) -> bool:
        """As the newest report says, which must be of the newest epoch."""
        report, joined = self.last_report(instance), self.log.of(InstanceJoined, instance)
        return report is not None and report.serving and report.epoch == joined[-1].epoch

    def state(self) -> State:
        """What a scheduler makes of the log."""
        state = State(PoolSettings(block_tokens=2 * BLOCK))
        for sequence, event in enumerate(self.log.events, 1):
            state.apply(event, sequence)
        return state

    def lacks(self, instance: str) -> dict[str, str]:
        return {part: why for part, why in self.board.lacks.items() if part.endswith(f" of {instance}")}


@dataclass
class Failures:
    """Engines whose events cannot be opened."""

    instances: set[str] = field(default_factory=set)


def target(name: str, publisher: FakePublisher | None = None, **facts: Any) -> EngineTarget:
    made = EngineTarget(
        instance=InstanceId(name),
        url=f"http://{name}:1",
        kv_endpoint=publisher.endpoint if publisher else "",
        kv_replay_endpoint=publisher.replay_endpoint if publisher else "",
    )
    return replace(made, **facts)


@asynccontextmanager
async def following(
    *sources: EngineDiscovery,
    engines: dict[str, ToldEngine] | None = None,
    broker: MemoryBroker | None = None,
    failures: Failures | None = None,
    vanished_seconds: float = 0.6,
    pausing: bool = False,
    alone: bool = False,
    link_of: Callable[[MemoryBroker, ScaledClock], Any] = lambda broker, clock: broker.client(clock, name="worker"),
    **settings: Any,
) -> AsyncIterator[FollowingWorker]:
    clock, board, broker = ScaledClock(), HealthBoard(), broker or MemoryBroker(POOL)
    link, known = link_of(broker, clock), engines if engines is not None else {}

    def events_of(followed: EngineTarget) -> EventSource | None:
        if failures is not None and followed.instance in failures.instances:
            raise OSError("no such socket")
        if not followed.kv_endpoint:
            return None
        return KvEventReader(KvEndpoint(followed.kv_endpoint, followed.kv_replay_endpoint), idle_check_seconds=0.2)

    context = WorkerContext(
        link=link,
        clock=clock,
        board=board,
        settings=WorkerSettings(
            **{"block_tokens": 2 * BLOCK, "flush_ms": 2.0, "report_seconds": WallSeconds(0.1), **settings}
        ),
        calibration=None,
        open_engine=lambda followed: nullcontext(known.setdefault(followed.instance, ToldEngine())),
        open_events=events_of,
        alone=alone,
    )
    fleet = EngineFleet(context, sources, vanished_seconds=WallSeconds(vanished_seconds))
    task = asyncio.create_task(fleet.run())
    try:
        yield FollowingWorker(LogView(broker), board, fleet, known, task)
    finally:
        await fleet.stop("test over", pausing=pausing)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
