"""Minimum TTFT: the instance where the first token is predicted soonest.

Source: Mooncake's Conductor (FAST'25), Algorithm 1, without a shared tier: queue time plus prefill time of what is
not cached. Bias: greedy; it takes an idle instance over a warm one as soon as recomputing is quicker for this
request, and everyone behind pays for the recomputation. Limit: with stale load all routers herd to one instance.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, options_of


@dataclass(frozen=True)
class MinTtft(RoutingPolicy):
    """`tie_seconds`: predictions closer than this are equal, and the longer hit, then the familiar one, wins."""

    name: ClassVar[str] = "min_ttft"

    tie_seconds: float = 0.001

    @override
    def choose(self, view: PoolView) -> Choice:
        options = options_of(view)
        soonest = min(option.predicted_ttft for option in options)
        near = [option for option in options if option.predicted_ttft <= soonest + self.tie_seconds]
        most = max(option.cached_tokens for option in near)
        chosen = view.familiar([option for option in near if option.cached_tokens == most])
        return Choice(chosen, f"first token soonest, in {chosen.predicted_ttft:.3f} s", options)
