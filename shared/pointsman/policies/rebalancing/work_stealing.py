"""Moves a request where it computes no more than where it waits, or to an instance that is about to run idle. Source:
DualMap's Eq. 6 without its pair (`migration_planner`); work stealing (Blumofe and Leiserson 1999) for what must be
computed again. Bias: later requests of a moved prefix may not find the copy. Limit: late queues stay where every
instance is busy."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.global_benefit import anywhere
from pointsman.policies.rebalancing.migration_planner import Bounds, MigrationPlanner
from pointsman.policies.stall_detection import STALL_SECONDS
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True)
class WorkStealing(RebalancingPolicy):
    """`idle_queue_seconds`: behind no more work than that a prefix may be computed again. Others as in `DualMapPair`."""

    name: ClassVar[str] = "work_stealing"

    ttft_slo_threshold: float = 1.0
    stall_seconds: float = STALL_SECONDS
    migrations_max: int = 64
    idle_queue_seconds: float = 0.3

    @override
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        bounds = Bounds(
            slo_share=self.ttft_slo_threshold,
            stall_seconds=self.stall_seconds,
            migrations_max=self.migrations_max,
            recompute_queue_max=self.idle_queue_seconds,
        )
        return MigrationPlanner(state, now, bounds).plan(anywhere)
