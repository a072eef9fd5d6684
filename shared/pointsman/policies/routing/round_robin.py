"""Each instance in turn. Bias: counts requests, not work. Limit: a join shifts all turns."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    name: ClassVar[str] = "round_robin"

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        return Choice(candidates[view.placements % len(candidates)], "its turn", candidates)
