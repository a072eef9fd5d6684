"""Policies that move requests by a round of the migration planner. They differ in its limits and in the targets."""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.migration_planner import MigrationPlanner, RoundLimits, Targets
from pointsman.policies.stall_detection import STALL_SECONDS
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True)
class PlannedRebalancing(RebalancingPolicy):
    """`ttft_slo_threshold`: share of its TTFT SLO that a request may take. `stall_seconds`: 0 ignores stalls."""

    ttft_slo_threshold: float = 1.0
    stall_seconds: float = STALL_SECONDS
    migrations_max: int = 64

    @override
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        return MigrationPlanner(state, now, self.limits).plan(self.targets)

    @property
    def limits(self) -> RoundLimits:
        return RoundLimits(
            slo_share=self.ttft_slo_threshold,
            stall_seconds=self.stall_seconds,
            migrations_max=self.migrations_max,
        )

    def targets(self, planner: MigrationPlanner) -> Targets:
        """Any ready instance, the shortest queue first."""
        by_queue = sorted(planner.targets.values(), key=lambda target: target.queue)
        return lambda _request: by_queue
