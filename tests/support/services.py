"""Services in the test's own process, put together as in production; what they share is in memory or on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from pointsman.adapters.clocks import ForwardClock, ScaledClock
from pointsman.adapters.http_engine import EngineFacts, EngineLoad, EngineUnreachableError
from pointsman.ports import Clock, EngineTarget, Link
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tracing import Tracer
from pointsman_ingress.assembly import assembled
from pointsman_ingress.servers import http_server
from pointsman_ingress.settings import IngressSettings
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.service import SchedulerService, start_scheduler
from pointsman_scheduler.settings import SchedulerSettings
from pointsman_worker.engine_monitor import Engine
from pointsman_worker.service import WorkerService
from pointsman_worker.session import UNCONFIRMED_WALL_SECONDS, EventSource
from pointsman_worker.settings import WorkerSettings
from tests.support.fake_publisher import BLOCK
from tests.support.waiting import eventually

LEASE_SECONDS = 10.0
"""Longer than any stall of a busy machine: many clients in tests ask once, where an ingress would ask the next leader
again. Tests whose subject it is say their own."""

USUAL: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "engine_urls": ("http://*:*",)}


@asynccontextmanager
async def running_scheduler(
    link: Link, clock: ScaledClock, *, name: str = "s", tracer: Tracer | None = None, **settings: Any
) -> AsyncIterator[SchedulerService]:
    """A scheduler that is ready, to lead or to follow; when the context ends it is killed."""
    told, board = SchedulerSettings(**USUAL | settings), HealthBoard()
    async with Supervisor() as supervisor:
        context = SchedulerContext(
            settings=told,
            policies=told.policies(),
            link=link,
            clock=ForwardClock(clock),
            board=board,
            name=name,
            tracer=tracer,
        )
        service = start_scheduler(supervisor, context)
        await eventually(lambda: board.whole, what="readiness")
        yield service


class ToldEngine:
    """An engine's HTTP side as its worker sees it."""

    def __init__(
        self, *, away: bool = False, hangs: bool = False, load: EngineLoad | None = None, **facts: Any
    ) -> None:
        usual: dict[str, Any] = {"model": "m", "version": "1", "block_tokens": BLOCK, "kv_capacity_tokens": 4_096}
        self.facts = EngineFacts(**usual | {"max_model_len": 512} | facts)
        """But for the further names, which are those of `load_now`."""
        self.load_now = load or EngineLoad()
        self.away = away
        self.hangs = hangs
        self.asked = 0

    def becomes(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    async def describe(self) -> EngineFacts:
        names = (await self.load()).further_names
        return replace(self.facts, further_names=names) if names else self.facts

    async def load(self) -> EngineLoad:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise EngineUnreachableError("refused", refused=True)
        return self.load_now


def worker_over(
    link: Link,
    clock: Clock,
    engine: Engine,
    target: EngineTarget,
    settings: WorkerSettings,
    events: EventSource | None = None,
    *,
    board: HealthBoard | None = None,
    unconfirmed_wall_seconds: WallSeconds = UNCONFIRMED_WALL_SECONDS,
) -> WorkerService:
    """To be run. `events`: None for an engine without them."""
    return WorkerService(
        link=link,
        clock=clock,
        board=board or HealthBoard(),
        settings=settings,
        target=target,
        engine=engine,
        events=events,
        unconfirmed_wall_seconds=unconfirmed_wall_seconds,
    )


def ingress_settings(**settings: Any) -> IngressSettings:
    """On free ports, without probes, and with an end that is quick."""
    usual: dict[str, Any] = {"name": "ingress-1", "probe": False, "port": 0, "admin_port": 0, "lame_duck_seconds": 0.0}
    return IngressSettings(**usual | {"drain_seconds_max": 1.0} | settings)


@asynccontextmanager
async def running_ingress(links: Mapping[PoolName, Link], clock: ScaledClock, **settings: Any) -> AsyncIterator[str]:
    """Its URL, once every pool is ready."""
    told, board, boards = ingress_settings(**settings), HealthBoard(), {pool: HealthBoard() for pool in links}
    async with (
        Supervisor() as supervisor,
        assembled(told, links, clock=clock, board=board, supervisor=supervisor, pool_boards=boards) as apps,
    ):
        server = http_server(apps.api, told, board)
        serving = asyncio.create_task(server.serve())
        try:
            await eventually(lambda: server.started and all(each.whole for each in boards.values()), what="readiness")
            yield f"http://127.0.0.1:{server.bound_port}"
        finally:
            server.should_exit = True
            await serving
