"""Off: requests stay while their instance takes requests. Source: the `no-rebalance` ablation of DualMap."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True)
class Off(RebalancingPolicy):
    name: ClassVar[str] = "off"

    @override
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        return MigrationPlan(state.sequence)
