"""Roles of a split fleet that change while it runs: its scaler, an operator's wish, and who has which role."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman.adapters.providers.static import StaticProvider
from pointsman.contracts.commands import ScaleAnswered, ScalePool
from pointsman.policies.policy_set import scaling_policy
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.supervision import Supervisor
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings
from tests.support.split_fleet import SplitFleet
from tests.support.waiting import eventually


@asynccontextmanager
async def scaler(
    fleet: SplitFleet, name: str, policy: str = "manual", values: dict[str, float] | None = None
) -> AsyncIterator[ScalerService]:
    """It sizes the roles, and starts and stops no instance."""
    count = len(fleet.scheduler.state.fleet.instances)
    settings = ScalerSettings(
        min_instances=count,
        max_instances=count,
        pause_up_seconds=5.0,
        scaler_lease_seconds=WallSeconds(0.6),
        speed=fleet.pool.clock.speed,
    )
    link = fleet.pool.broker.client(fleet.pool.clock, name=name)
    service = ScalerService(
        link=link,
        provider=StaticProvider(),
        policy=scaling_policy(policy, dict(values or {})), clock=fleet.pool.clock, board=HealthBoard(), settings=settings,
        name=name,
    )  # fmt: skip
    async with Supervisor() as supervisor:
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.act(), name="act")
        await eventually(lambda: service.acts, seconds=10.0)
        yield service


async def scale(fleet: SplitFleet, prefill: int, decode: int) -> ScaleAnswered:
    answer = await fleet.pool.operate(ScalePool(prefill=prefill, decode=decode), action="scale")
    assert isinstance(answer, ScaleAnswered)
    return answer


def roles(fleet: SplitFleet) -> Counter[str]:
    return Counter(instance.role for instance in fleet.scheduler.state.fleet.instances)
