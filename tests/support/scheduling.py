"""A scheduler in the test's own process, put together as in production."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pointsman.adapters.clocks import ScaledClock
from pointsman.ports import Link
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tracing import Tracer
from pointsman_scheduler.main import start_scheduler
from pointsman_scheduler.policy_config import chosen_policies
from pointsman_scheduler.service import SchedulerService
from pointsman_scheduler.settings import SchedulerSettings
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
        service = start_scheduler(
            supervisor,
            link,
            settings=told,
            policies=chosen_policies(told),
            clock=clock,
            board=board,
            name=name,
            tracer=tracer,
        )
        await eventually(lambda: board.whole, what="readiness")
        yield service
