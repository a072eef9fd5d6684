"""Approximate token load: a holder of most of the prompt until it is saturated, else the least token load.

Source: llm-d's router, prefix-cache affinity filter before the token-load scorer: keep instances that hold at least
`hit_share_min` of the prompt, unless the soonest of them is more than `penalty_s` later than the soonest of all; then
the fewest tokens to prefill. Bias: growing conversations scatter whenever a turn adds more than a fifth. Limit: one
`penalty_s` for all prompt lengths; llm-d's presets have 5 s and 18 s.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class ApproximateTokenLoad(RoutingPolicy):
    """`penalty_s`: how much later than anywhere else a first token may come for the sake of the cache."""

    name: ClassVar[str] = "approximate_token_load"

    hit_share_min: float = 0.8
    penalty_s: float = 5.0

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        enough = self.hit_share_min * view.request.prompt_tokens
        sticky = [candidate for candidate in candidates if candidate.cached_tokens >= enough]
        if not sticky:
            return Choice(
                _lightest(view, candidates), "no instance holds enough of the prompt: least token load", candidates
            )
        if _soonest(sticky) - _soonest(candidates) > self.penalty_s:
            return Choice(_lightest(view, candidates), "its holders are saturated: least token load", candidates)
        return Choice(_lightest(view, sticky), f"least token load of {len(sticky)} that hold most of it", candidates)


def _soonest(candidates: list[CandidateEstimate]) -> float:
    return min(candidate.predicted_ttft for candidate in candidates)


def _lightest(view: PoolView, candidates: list[CandidateEstimate]) -> CandidateEstimate:
    least = min((candidate.load_tokens, candidate.requests) for candidate in candidates)
    return view.familiar(
        [candidate for candidate in candidates if (candidate.load_tokens, candidate.requests) == least]
    )
