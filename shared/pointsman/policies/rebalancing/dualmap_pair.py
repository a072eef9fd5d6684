"""Moves a request to the other instance of its DualMap pair. Source: DualMap's hotspot-aware rebalancing, Eq. 6
(`migration_planner`). Bias: a hot prefix with both instances overloaded waits while a third is idle. Limit: moves
little if placement saw fresh load; it pays if load lags, engines stall, or a hot prefix arrives at once."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.pool_view import PoolView
from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.migration_planner import Bounds, MigrationPlanner, Target, Targets
from pointsman.policies.stall_detection import STALL_SECONDS
from pointsman.primitives import BlockKey, EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import Request


@dataclass(frozen=True)
class DualMapPair(RebalancingPolicy):
    """`ttft_slo_threshold`: share of its TTFT SLO that a request may take. `stall_seconds`: 0 ignores stalls."""

    name: ClassVar[str] = "dualmap_pair"

    ttft_slo_threshold: float = 1.0
    stall_seconds: float = STALL_SECONDS
    migrations_max: int = 64

    @override
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        bounds = Bounds(
            slo_share=self.ttft_slo_threshold,
            stall_seconds=self.stall_seconds,
            migrations_max=self.migrations_max,
        )
        return MigrationPlanner(state, now, bounds).plan(lambda planner: _within_the_pair(planner, state, now))


def _within_the_pair(planner: MigrationPlanner, state: State, now: EngineSeconds) -> Targets:
    ready = state.fleet.ready
    known: dict[BlockKey, list[Target]] = {}

    def targets(request: Request) -> list[Target]:
        key = PoolView(state, request, now).ring_key
        pair = known.get(key)
        if pair is None:
            pair = [planner.targets[i] for i in candidate_pair(ready, key) if i in planner.targets]
            known[key] = pair
        return pair

    return targets
