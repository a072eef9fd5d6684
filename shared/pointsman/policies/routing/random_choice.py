"""Any instance with equal chance. Bias: none. Limit: long prompts may queue behind each other."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, require_eligible
from pointsman.policies.seeded_random import pick


@dataclass(frozen=True)
class RandomChoice(RoutingPolicy):
    name: ClassVar[str] = "random"
    rule: ClassVar[str] = "looks at no queue"

    seed: int = 0

    @override
    def choose(self, view: PoolView) -> Choice:
        instances = require_eligible(view)
        candidate = view.candidate(instances[pick(len(instances), self.seed, view.request.id)])
        return Choice(candidate, "by chance", [candidate])
