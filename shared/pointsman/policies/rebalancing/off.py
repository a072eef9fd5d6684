"""Off: what was placed stays, until its instance takes no requests any more.

Source: the `no-rebalance` ablation of DualMap, and every router here that only places. Bias: a bad placement, or one
that turned bad, is paid for in full.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.base import MigrationPlan, RebalancingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State


@dataclass(frozen=True)
class Off(RebalancingPolicy):
    name: ClassVar[str] = "off"

    @override
    def plan(self, state: State, now: Seconds) -> MigrationPlan:
        return MigrationPlan(state.sequence)
