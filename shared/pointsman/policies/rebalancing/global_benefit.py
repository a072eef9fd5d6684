"""Moves a request to the ready instance with the soonest first token. Source: DualMap's Eq. 6 without its pair. Our
own: prefill that the source would not compute counts `waste_weight` times more. Bias: spreads prefixes beyond their
pairs, where routing may not find them. Limit: with stale load, moves herd."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.rebalancing.migration_planner import RoundLimits
from pointsman.policies.rebalancing.planned import PlannedRebalancing


@dataclass(frozen=True)
class GlobalBenefit(PlannedRebalancing):
    name: ClassVar[str] = "global"

    waste_weight: float = 1.0

    @property
    @override
    def limits(self) -> RoundLimits:
        return replace(super().limits, waste_weight=self.waste_weight)
