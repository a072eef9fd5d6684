"""Moves a request to the other instance of its DualMap pair. Source: DualMap's hotspot-aware rebalancing, Eq. 6
(`migration_planner`). Bias: a hot prefix with both instances overloaded waits while a third is idle. Limit: moves
little if placement saw fresh load; it pays if load lags, engines stall, or a hot prefix arrives at once."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.pool_view import PoolView
from pointsman.policies.rebalancing.migration_planner import MigrationPlanner, Target, Targets
from pointsman.policies.rebalancing.planned import PlannedRebalancing
from pointsman.primitives import BlockKey
from pointsman.state.workload import Request


@dataclass(frozen=True)
class DualMapPair(PlannedRebalancing):
    name: ClassVar[str] = "dualmap_pair"

    @override
    def targets(self, planner: MigrationPlanner) -> Targets:
        state, now, ready = planner.state, planner.now, planner.state.fleet.ready
        known: dict[BlockKey, list[Target]] = {}

        def pair_of(request: Request) -> list[Target]:
            key = PoolView(state, request, now).ring_key
            pair = known.get(key)
            if pair is None:
                pair = [planner.targets[i] for i in candidate_pair(ready, key) if i in planner.targets]
                known[key] = pair
            return pair

        return pair_of
