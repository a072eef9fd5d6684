"""Approximate token load: stay with a holder of most of the prompt until it is saturated, else the least token load.

Source: llm-d's router, its prefix-cache affinity filter before its token-load scorer: instances that hold at least
`hit_share_min` of the prompt are kept, unless the soonest of them is predicted more than `penalty_s` later than
the soonest of all; of those left, the one with the fewest tokens to prefill. Bias: a prompt that is half cached counts
like one that is not cached at all, so growing conversations scatter whenever a turn adds more than a fifth. Limit:
`penalty_s` is one number for short and long prompts; llm-d's presets have 5 s and 18 s.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, options_of


@dataclass(frozen=True)
class ApproximateTokenLoad(RoutingPolicy):
    """`penalty_s`: how much later than anywhere else a first token may come for the sake of the cache."""

    name: ClassVar[str] = "approximate_token_load"

    hit_share_min: float = 0.8
    penalty_s: float = 5.0

    @override
    def choose(self, view: PoolView) -> Choice:
        options = options_of(view)
        enough = self.hit_share_min * view.request.prompt_tokens
        sticky = [option for option in options if option.cached_tokens >= enough]
        if not sticky:
            return Choice(_lightest(view, options), "no instance holds enough of the prompt: least token load", options)
        if _soonest(sticky) - _soonest(options) > self.penalty_s:
            return Choice(_lightest(view, options), "its holders are saturated: least token load", options)
        return Choice(_lightest(view, sticky), f"least token load of {len(sticky)} that hold most of it", options)


def _soonest(options: list[Option]) -> float:
    return min(option.predicted_ttft for option in options)


def _lightest(view: PoolView, options: list[Option]) -> Option:
    least = min((option.load_tokens, option.requests) for option in options)
    return view.familiar([option for option in options if (option.load_tokens, option.requests) == least])
