"""Most prompt tokens in the cache first, promised blocks excluded. Source: SGLang (Zheng et al., NeurIPS'24, section
3). Bias: towards long shared prompts; a request that came more than (difference of hits) / `ageing_tokens` later
overtakes none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds, Tokens
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class LongestPrefixMatch(OrderingPolicy):
    """`ageing_tokens`: cached tokens that a second of waiting outweighs; 0 (SGLang) starves."""

    name: ClassVar[str] = "lpm"

    ageing_tokens: float = 50.0

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        return longest_match(queue.pending.values(), state, self.ageing_tokens)


def longest_match(requests: Iterable[Request], state: State, ageing_tokens: float = 0.0) -> Request:
    """Most cached tokens, less ageing; the first of equals."""
    return max(requests, key=lambda r: tokens_held(r, state) - ageing_tokens * r.arrived_at)


def tokens_held(request: Request, state: State) -> Tokens:
    blocks = state.index.depth(request.instance, request.keys)
    return blocks * state.settings.block_tokens
