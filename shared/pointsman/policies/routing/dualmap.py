"""DualMap (ICLR 2026): each prefix maps to two instances (Eq. 5), by a length that adapts to traffic (`state.hotness`).
The longer hit wins unless it would exceed the TTFT threshold and the other would not; equal hits go to the less loaded.
Stalled time counts as queue time. Unlike the paper, and better: if both exceed the threshold the longer hit stays
(`both_over=affine`), and prefixes extend above 1/n of the traffic. Bias: wastes idle instances beyond the pair. Limit:
prompts shorter than a block spread by id."""

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.bounds import COUNT, bounded
from pointsman.contracts.decisions import Settings
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.hash_ring import candidate_pair, ring_candidates
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, least_loaded, load_of, require_eligible
from pointsman.policies.stall_detection import STALL_SECONDS, stalled_seconds
from pointsman.primitives import InstanceId

BOTH_OVER = ("affine", "least_loaded")
ABLATIONS = ("", "cache-affinity", "least-loaded", "min-ttft")


@dataclass(frozen=True)
class DualMap(RoutingPolicy):
    """`ablation`: one criterion only, as in the paper. `candidates`: other than 2 for its Figure 15. `stall_seconds`: 0
    ignores stalls."""

    name: ClassVar[str] = "dualmap"
    rule: ClassVar[str] = "looks only at the two engines of a prefix"
    absent: ClassVar[Settings] = {"candidates": 2}

    ttft_slo_threshold: float = 1.0
    both_over: str = "affine"
    ablation: str = ""
    stall_seconds: float = STALL_SECONDS
    candidates: int = bounded(2, COUNT)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.both_over not in BOTH_OVER:
            raise ValueError(f"both_over must be {' or '.join(BOTH_OVER)}, not {self.both_over}")
        if self.ablation not in ABLATIONS:
            raise ValueError(f"ablation must be empty or one of {', '.join(ABLATIONS[1:])}, not {self.ablation}")

    @override
    def choose(self, view: PoolView) -> Choice:
        eligible = require_eligible(view)
        if self.candidates == 2:
            owners = candidate_pair(eligible, view.ring_key)
        else:
            owners = ring_candidates(eligible, view.ring_key, self.candidates)
        candidates = [self._option(view, instance) for instance in owners]
        if len(candidates) == 1:
            return Choice(candidates[0], "the only instance", candidates)
        match self.ablation:
            case "cache-affinity":
                return Choice(_affine_first(candidates)[0], "the longer hit of the pair", candidates)
            case "least-loaded":
                return Choice(least_loaded(view, candidates), "the less loaded of the pair", candidates)
            case "min-ttft":
                soonest = min(_affine_first(candidates), key=lambda candidate: candidate.predicted_ttft)
                return Choice(soonest, "first token soonest of the pair", candidates)
            case _:
                return self._of_two(view, candidates) if len(candidates) == 2 else self._of_many(view, candidates)

    def _option(self, view: PoolView, instance: InstanceId) -> CandidateEstimate:
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
            return Choice(least_loaded(view, candidates), "equal hits: the less loaded candidate", candidates)
        limit = self.ttft_slo_threshold * view.budget
        if affine.predicted_ttft <= limit:
            return Choice(affine, f"holds {affine.cached_tokens} tokens of the prompt and meets the SLO", candidates)
        if other.predicted_ttft <= limit:
            return Choice(other, f"{affine.instance} holds more but would miss the SLO", candidates)
        if self.both_over == "affine":
            return Choice(affine, "both candidates would miss the SLO: the longer hit wastes least", candidates)
        return Choice(min(candidates, key=load_of), "both candidates would miss the SLO: the less loaded", candidates)

    def _of_many(self, view: PoolView, candidates: list[CandidateEstimate]) -> Choice:
        """The longest hit, then the less loaded, that meets the SLO."""
        ordered = sorted(candidates, key=lambda candidate: (-candidate.cached_tokens, *load_of(candidate)))
        limit = self.ttft_slo_threshold * view.budget
        for candidate in ordered:
            if candidate.predicted_ttft <= limit:
                return Choice(candidate, "the longest hit that meets the SLO", candidates)
        late = ordered[0] if self.both_over == "affine" else min(candidates, key=load_of)
        return Choice(late, "every candidate would miss the SLO", candidates)


def _affine_first(candidates: list[CandidateEstimate]) -> list[CandidateEstimate]:
    return sorted(candidates, key=lambda candidate: -candidate.cached_tokens)
