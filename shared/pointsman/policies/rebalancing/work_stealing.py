"""Moves a request where it computes no more than where it waits, or to an instance that is about to run idle. Source:
DualMap's Eq. 6 without its pair (`migration_planner`); work stealing (Blumofe and Leiserson 1999) for what must be
computed again. Bias: later requests of a moved prefix may not find the copy. Limit: late queues stay where every
instance is busy."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.migration_planner import RoundLimits
from pointsman.policies.rebalancing.planned import PlannedRebalancing


@dataclass(frozen=True)
class WorkStealing(PlannedRebalancing):
    """`idle_queue_seconds`: behind no more work than that a prefix may be computed again."""

    name: ClassVar[str] = "work_stealing"

    idle_queue_seconds: float = 0.3

    @property
    @override
    def limits(self) -> RoundLimits:
        return replace(super().limits, recompute_queue_max=self.idle_queue_seconds)
