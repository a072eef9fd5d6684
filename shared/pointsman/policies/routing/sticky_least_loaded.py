"""Longest prefix, unless its instance is much busier than the idlest. Source: the push-based stateful router, Algorithm
1, which always stays with a holder, however small its hit and however busy it is: `as_published`. Bias: one threshold
for all trade-offs. Limit: sticky conversations spread only above it."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.contracts.decisions import Settings
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of, load_of


@dataclass(frozen=True)
class StickyLeastLoaded(RoutingPolicy):
    name: ClassVar[str] = "sticky_least_loaded"
    rule: ClassVar[str] = "stays with the longest cached prefix until its engine is much busier than the idlest"
    absent: ClassVar[Settings] = {"as_published": False}

    imbalance_tokens_max: int = 16_384
    hit_share_min: float = bounded(0.05, SHARE)
    as_published: bool = False
    """The other settings are not used."""

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        least = min(candidates, key=lambda candidate: (*load_of(candidate), -candidate.cached_tokens))
        most_cached = max(candidate.cached_tokens for candidate in candidates)
        enough = 0.0 if self.as_published else self.hit_share_min * view.request.prompt_tokens
        if most_cached < enough or most_cached == 0:
            return Choice(least, "no instance holds enough of the prompt: least loaded", candidates)
        holders = [candidate for candidate in candidates if candidate.cached_tokens == most_cached]
        lightest = min(candidate.queued_tokens for candidate in holders)
        sticky = view.familiar([candidate for candidate in holders if candidate.queued_tokens == lightest])
        if sticky.queued_tokens - least.queued_tokens > self.imbalance_tokens_max and not self.as_published:
            return Choice(least, f"{sticky.instance} holds more but is too busy: least loaded", candidates)
        return Choice(sticky, f"holds {most_cached} tokens of the prompt", candidates)
