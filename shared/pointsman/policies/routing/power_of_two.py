"""The less loaded of two random instances. Source: Mitzenmacher (2001). Bias: blind to the cache; herds less than
`least_loaded`. Limit: half of the time neither is idle."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, least_loaded, require_eligible
from pointsman.policies.seeded_random import pick
from pointsman.primitives import InstanceId


@dataclass(frozen=True)
class PowerOfTwo(RoutingPolicy):
    name: ClassVar[str] = "power_of_two"
    rule: ClassVar[str] = "looks only at two engines drawn by chance"

    seed: int = 0

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = [view.candidate(instance) for instance in self._drawn(view)]
        return Choice(least_loaded(view, candidates), f"the less loaded of {len(candidates)} by chance", candidates)

    def _drawn(self, view: PoolView) -> list[InstanceId]:
        instances = require_eligible(view)
        first = pick(len(instances), self.seed, view.request.id, "first")
        others = [*instances[:first], *instances[first + 1 :]]
        if not others:
            return [instances[first]]
        return [instances[first], others[pick(len(others), self.seed, view.request.id, "second")]]
