"""Fewest uncached prompt tokens waiting or in prefill. Source: join the shortest queue, DualMap's baseline. Bias: blind
to the cache. Limit: load of other routers is not seen."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of, least_loaded


@dataclass(frozen=True)
class LeastLoaded(RoutingPolicy):
    name: ClassVar[str] = "least_loaded"
    rule: ClassVar[str] = "counts tokens that wait, and neither hits nor the speed of an engine"

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        chosen = least_loaded(view, candidates)
        return Choice(chosen, f"least loaded, {chosen.queued_tokens} tokens to prefill", candidates)
