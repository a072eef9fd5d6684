"""DualMap: each prefix belongs to two instances; affinity decides between them until the SLO is at risk.

Source: DualMap (ICLR 2026): dual hash rings with distinct candidates (Eq. 5), a prefix length that adapts to traffic
(`state.hotness`), and the candidate with the longer hit unless its predicted TTFT exceeds the threshold and the other's
does not; equal hits go to the less loaded. An instance that finishes no prefill for 3 s counts as that much busier
(`stall_detection`). Bad placements move later (`rebalancing.dualmap_pair`).

Two defaults differ from the paper and measured better: where both candidates exceed the threshold, keep the longer hit
(`both_over=affine`; paper: `least_loaded`), and the tree extends above 1/n and shortens below 0.5/n of the traffic
(`hot_share`, `cold_share`; paper: 2 and 1).

Bias: never looks beyond two instances, so it wastes idle ones and is robust against stale load. Limit: prompts shorter
than a block are spread by request id.
"""

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, require_eligible
from pointsman.policies.stall_detection import STALL_SECONDS, stalled_seconds
from pointsman.primitives import InstanceId

BOTH_OVER = ("affine", "least_loaded")
ABLATIONS = ("", "cache-affinity", "least-loaded", "min-ttft")


@dataclass(frozen=True)
class DualMap(RoutingPolicy):
    """`ttft_slo_threshold`: share of the TTFT budget above which a candidate is overloaded. `ablation`: decide by one
    criterion only, as in the paper. `stall_seconds`: 0 ignores stalls."""

    name: ClassVar[str] = "dualmap"

    ttft_slo_threshold: float = 1.0
    both_over: str = "affine"
    ablation: str = ""
    stall_seconds: float = STALL_SECONDS

    def __post_init__(self) -> None:
        if self.both_over not in BOTH_OVER:
            msg = f"both_over must be {' or '.join(BOTH_OVER)}, not {self.both_over}"
            raise ValueError(msg)
        if self.ablation not in ABLATIONS:
            msg = f"ablation must be empty or one of {', '.join(ABLATIONS[1:])}, not {self.ablation}"
            raise ValueError(msg)

    @override
    def choose(self, view: PoolView) -> Choice:
        pair = candidate_pair(require_eligible(view), view.ring_key)
        candidates = [self._option(view, instance) for instance in pair]
        if len(candidates) == 1:
            return Choice(candidates[0], "the only instance", candidates)
        match self.ablation:
            case "cache-affinity":
                return Choice(_affine_first(candidates)[0], "the longer hit of the pair", candidates)
            case "least-loaded":
                return _less_loaded(view, candidates, "the less loaded of the pair")
            case "min-ttft":
                soonest = min(_affine_first(candidates), key=lambda candidate: candidate.predicted_ttft)
                return Choice(soonest, "first token soonest of the pair", candidates)
            case _:
                return self._of_two(view, candidates)

    def _option(self, view: PoolView, instance: InstanceId) -> CandidateEstimate:
        """The candidate, with the time that the instance has been stalled in its queue."""
        candidate = view.candidate(instance)
        if self.stall_seconds <= 0:
            return candidate
        stalled = stalled_seconds(view.queue(instance), view.now, after=self.stall_seconds)
        return (
            msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds + stalled)
            if stalled
            else candidate
        )

    def _of_two(self, view: PoolView, candidates: list[CandidateEstimate]) -> Choice:
        affine, other = _affine_first(candidates)
        if affine.cached_tokens == other.cached_tokens:
            return _less_loaded(view, candidates, "equal hits: the less loaded candidate")
        limit = self.ttft_slo_threshold * view.budget
        if affine.predicted_ttft <= limit:
            return Choice(affine, f"holds {affine.cached_tokens} tokens of the prompt and meets the SLO", candidates)
        if other.predicted_ttft <= limit:
            return Choice(other, f"{affine.instance} holds more but would miss the SLO", candidates)
        if self.both_over == "affine":
            return Choice(affine, "both candidates would miss the SLO: the longer hit wastes least", candidates)
        return Choice(min(candidates, key=_load), "both candidates would miss the SLO: the less loaded", candidates)


def _affine_first(candidates: list[CandidateEstimate]) -> list[CandidateEstimate]:
    """The longer hit first; equal hits in the order of the pair."""
    return sorted(candidates, key=lambda candidate: -candidate.cached_tokens)


def _less_loaded(view: PoolView, candidates: list[CandidateEstimate], reason: str) -> Choice:
    least = min(_load(candidate) for candidate in candidates)
    equals = [candidate for candidate in candidates if _load(candidate) == least]
    return Choice(view.familiar(equals), reason, candidates)


def _load(candidate: CandidateEstimate) -> tuple[int, int]:
    return candidate.load_tokens, candidate.requests
