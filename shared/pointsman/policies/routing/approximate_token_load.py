"""Prefers holders of most of the prompt until they are saturated; then the least token load. Source: llm-d's router:
holders of `hit_share_min`, unless the soonest is more than `penalty_s` later than the soonest of all. Bias:
conversations scatter if a turn adds more than a fifth. Limit: one `penalty_s` for all prompt lengths."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of, least_loaded


@dataclass(frozen=True)
class ApproximateTokenLoad(RoutingPolicy):
    """`penalty_s`: TTFT that a hit may cost."""

    name: ClassVar[str] = "approximate_token_load"
    rule: ClassVar[str] = "stays with an engine that holds most of the prompt until that is saturated"

    hit_share_min: float = bounded(0.8, SHARE)
    penalty_s: float = 5.0

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        enough = self.hit_share_min * view.request.prompt_tokens
        sticky = [candidate for candidate in candidates if candidate.cached_tokens >= enough]
        if not sticky:
            reason = "no instance holds enough of the prompt: least token load"
            return Choice(least_loaded(view, candidates), reason, candidates)
        if _soonest(sticky) - _soonest(candidates) > self.penalty_s:
            return Choice(least_loaded(view, candidates), "its holders are saturated: least token load", candidates)
        return Choice(least_loaded(view, sticky), f"least token load of {len(sticky)} that hold most of it", candidates)


def _soonest(candidates: list[CandidateEstimate]) -> float:
    return min(candidate.predicted_ttft for candidate in candidates)
