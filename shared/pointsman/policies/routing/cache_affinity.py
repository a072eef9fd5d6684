"""One home per prefix, whatever the load. Source: consistent hashing (Karger et al., 1997), the first of DualMap's
rings. Bias: best hit rate of a single home. Limit: a hot prefix overloads its home until it is split; prompts shorter
than a block spread by id."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.hash_ring import ring
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, require_eligible
from pointsman.policies.seeded_random import pick
from pointsman.primitives import InstanceId


@dataclass(frozen=True)
class CacheAffinity(RoutingPolicy):
    name: ClassVar[str] = "cache_affinity"
    rule: ClassVar[str] = "sends a prefix always to the same engine, whatever its queue"

    @override
    def choose(self, view: PoolView) -> Choice:
        instances = require_eligible(view)
        home = _home(view)
        if home is None:
            stray = view.candidate(instances[pick(len(instances), 0, view.request.id)])
            return Choice(stray, "no whole block, so no prefix: by request id", [stray])
        candidate = view.candidate(home)
        return Choice(candidate, "the home of its prefix", [candidate])


def _home(view: PoolView) -> InstanceId | None:
    key = view.affinity_key
    return None if key is None else ring(view.eligible, "ring-1").owner(key)
