"""DualMap: each prefix belongs to two instances; affinity decides between them until the SLO is at risk.

Source: DualMap: dual hash rings with distinct candidates (Eq. 5), the prefix length that decides adapts to
traffic (hotness tree, see `state.hotness`), and SLO-aware choice: the candidate with the longer hit, unless its
predicted TTFT exceeds the threshold and the other's does not; equal hits go to the less loaded.
Where both exceed it, `both_over` says whether to stay with the longer hit (`affine`, which measured better) or to
go to the less loaded (`least_loaded`, as the paper writes).

Bias: never looks beyond two instances, so it wastes idle ones, and keeps its head when load information is old.
Limit: prompts shorter than one block have no prefix; they are spread by request id.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, require_eligible
from pointsman.primitives import BlockKey, RequestId


@dataclass(frozen=True)
class DualMap(RoutingPolicy):
    """`ttft_slo_threshold`: the share of the TTFT budget above which a candidate counts as overloaded."""

    name: ClassVar[str] = "dualmap"

    ttft_slo_threshold: float = 1.0
    both_over: str = "affine"

    def __post_init__(self) -> None:
        if self.both_over not in ("affine", "least_loaded"):
            msg = f"both_over must be affine or least_loaded, not {self.both_over}"
            raise ValueError(msg)

    @override
    def choose(self, view: PoolView) -> Choice:
        pair = candidate_pair(require_eligible(view), _ring_key(view))
        options = [view.option(instance) for instance in pair]
        if len(options) == 1:
            return Choice(options[0], "the only instance", options)
        return self._of_two(view, options)

    def _of_two(self, view: PoolView, options: list[Option]) -> Choice:
        affine, other = sorted(options, key=lambda o: -o.cached_tokens)
        if affine.cached_tokens == other.cached_tokens:
            return _less_loaded(view, options)
        limit = self.ttft_slo_threshold * view.budget
        if affine.predicted_ttft <= limit:
            return Choice(affine, f"holds {affine.cached_tokens} tokens of the prompt and meets the SLO", options)
        if other.predicted_ttft <= limit:
            return Choice(other, f"{affine.instance} holds more but would miss the SLO", options)
        if self.both_over == "affine":
            return Choice(affine, "both candidates would miss the SLO: the longer hit wastes least", options)
        return Choice(min(options, key=_load), "both candidates would miss the SLO: the less loaded", options)


def _less_loaded(view: PoolView, options: list[Option]) -> Choice:
    least = min(_load(option) for option in options)
    equals = [option for option in options if _load(option) == least]
    return Choice(view.familiar(equals), "equal hits: the less loaded candidate", options)


def _load(option: Option) -> tuple[int, int]:
    return option.load_tokens, option.requests


def _ring_key(view: PoolView) -> BlockKey:
    return view.affinity_key or _key_of_request(view.request.id)


def _key_of_request(request: RequestId) -> BlockKey:
    return BlockKey(int.from_bytes(blake2b(request.encode(), digest_size=8).digest(), "little"))
