"""Soonest predicted first token. Source: Mooncake's Conductor (FAST'25), Algorithm 1; where instances can fetch from each
other the prediction is that of the sooner of fetching and computing (`prefix_fetch`). Bias: greedy; prefers an idle
instance to a warm one. Limits: herds with stale load."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class MinTtft(RoutingPolicy):
    """`tie_seconds`: differences below are ties."""

    name: ClassVar[str] = "min_ttft"
    rule: ClassVar[str] = "takes the soonest of those it weighs"

    tie_seconds: float = 0.001

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        soonest = min(candidate.predicted_ttft for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.predicted_ttft <= soonest + self.tie_seconds]
        most = max(candidate.cached_tokens for candidate in near)
        chosen = view.familiar([candidate for candidate in near if candidate.cached_tokens == most])
        how = f", {chosen.fetched_tokens} tokens fetched from {chosen.fetch_from}" if chosen.fetch_from else ""
        return Choice(chosen, f"first token soonest, in {chosen.predicted_ttft:.3f} s{how}", candidates)
