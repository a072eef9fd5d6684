"""Moves a request to the ready instance with the soonest first token. Source: DualMap's Eq. 6 without its pair. Our
own: prefill that the source would not compute counts `waste_weight` times more. Bias: spreads prefixes beyond their
pairs, where routing may not find them. Limit: with stale load, moves herd."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.migration_planner import Bounds, MigrationPlanner, Targets
from pointsman.policies.stall_detection import STALL_SECONDS
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True)
class GlobalBenefit(RebalancingPolicy):
    name: ClassVar[str] = "global"

    ttft_slo_threshold: float = 1.0
    stall_seconds: float = STALL_SECONDS
    migrations_max: int = 64
    waste_weight: float = 1.0

    @override
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        bounds = Bounds(
            slo_share=self.ttft_slo_threshold,
            stall_seconds=self.stall_seconds,
            migrations_max=self.migrations_max,
            waste_weight=self.waste_weight,
        )
        return MigrationPlanner(state, now, bounds).plan(anywhere)


def anywhere(planner: MigrationPlanner) -> Targets:
    """By queue, the shortest first."""
    by_queue = sorted(planner.targets.values(), key=lambda target: target.queue)
    return lambda _request: by_queue
