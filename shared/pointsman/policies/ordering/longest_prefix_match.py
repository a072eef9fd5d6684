"""Longest prefix match: the request with the most prompt tokens in the cache now goes first.

Source: SGLang (Zheng et al., NeurIPS'24, section 3). Counts what the index holds, not promised blocks: every pending
request has promised its own. Bias: towards tenants with long shared prompts; with `ageing_tokens` no request is
overtaken by one that came more than (difference of hits) / `ageing_tokens` later.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import Seconds, Tokens
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class LongestPrefixMatch(OrderingPolicy):
    """`ageing_tokens`: cached tokens that a second of waiting makes up for; 0 is SGLang's, which starves."""

    name: ClassVar[str] = "lpm"

    ageing_tokens: float = 50.0

    @override
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        return longest_match(queue.pending.values(), state, self.ageing_tokens)


def longest_match(requests: Iterable[Request], state: State, ageing_tokens: float = 0.0) -> Request:
    """The one with the most cached tokens, less what others made up by waiting; the first of equals."""
    return max(requests, key=lambda r: tokens_held(r, state) - ageing_tokens * r.arrived_at)


def tokens_held(request: Request, state: State) -> Tokens:
    """Leading prompt tokens that the request's instance holds now."""
    blocks = state.index.hits(request.keys).get(request.instance, 0)
    return blocks * state.settings.block_tokens
