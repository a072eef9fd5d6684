"""Least loaded: the instance with the fewest uncached prompt tokens waiting or being prefilled.

Source: join the shortest queue, with work counted in tokens as in DualMap's baseline. Bias: blind to the cache;
equal prefixes scatter. Limit: load that others (another router, direct clients) cause is not seen.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, options_of


@dataclass(frozen=True)
class LeastLoaded(RoutingPolicy):
    name: ClassVar[str] = "least_loaded"

    @override
    def choose(self, view: PoolView) -> Choice:
        options = options_of(view)
        least = min((option.load_tokens, option.requests) for option in options)
        equals = [option for option in options if (option.load_tokens, option.requests) == least]
        return Choice(view.familiar(equals), f"least loaded, {least[0]} tokens to prefill", options)
