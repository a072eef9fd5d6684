"""What all parts of a scheduler share."""

from dataclasses import dataclass

from pointsman.adapters.clocks import ForwardClock
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import Link
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.tracing import Tracer
from pointsman_scheduler.settings import SchedulerSettings


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """`name`: of this process in log and lease; never reused."""

    settings: SchedulerSettings
    policies: PolicySet
    link: Link
    clock: ForwardClock
    board: HealthBoard
    name: str
    tracer: Tracer | None = None

    @property
    def pool(self) -> PoolName:
        return PoolName(self.settings.pool)
