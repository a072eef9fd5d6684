"""`min_ttft` of November 2026, which could price a transfer that nobody made. Source: Mooncake's Conductor (FAST'25), Algorithm 1; with a shared tier, a prefix is
transferred from the best holder if that has more than `kvcache_balancing_threshold` times the own hit and it is sooner
(section 6.2). Bias: greedy; prefers an idle instance to a warm one. Limits: herds with stale load; transfers need the
engines' own connector."""

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class MinTtft1(RoutingPolicy):
    """`tie_seconds`: differences below are ties. `transfer_tokens_per_s`: of the shared tier; 0: none."""

    name: ClassVar[str] = "min_ttft"

    tie_seconds: float = 0.001
    kvcache_balancing_threshold: float = 2.0
    transfer_tokens_per_s: float = 0.0

    @override
    def choose(self, view: PoolView) -> Choice:
        held = candidates_of(view)
        candidates = self._with_transfers(view, held) if self.transfer_tokens_per_s > 0 else held
        soonest = min(candidate.predicted_ttft for candidate in candidates)
        near = [
            (own, candidate)
            for own, candidate in zip(held, candidates, strict=True)
            if candidate.predicted_ttft <= soonest + self.tie_seconds
        ]
        most = max(own.cached_tokens for own, _ in near)
        chosen = view.familiar([candidate for own, candidate in near if own.cached_tokens == most])
        transferred = chosen.cached_tokens - most
        how = f", {transferred} tokens of it transferred" if transferred else ""
        return Choice(chosen, f"first token soonest, in {chosen.predicted_ttft:.3f} s{how}", candidates)

    def _with_transfers(self, view: PoolView, held: list[CandidateEstimate]) -> list[CandidateEstimate]:
        best = max(held, key=lambda candidate: candidate.cached_tokens)
        return [
            self._sooner(view, own, best)
            if best.cached_tokens > self.kvcache_balancing_threshold * own.cached_tokens
            else own
            for own in held
        ]

    def _sooner(self, view: PoolView, own: CandidateEstimate, best: CandidateEstimate) -> CandidateEstimate:
        fetched = view.candidate(own.instance, hit_blocks=best.hit_blocks)
        transfer_seconds = (fetched.cached_tokens - own.cached_tokens) / self.transfer_tokens_per_s
        fetched = msgspec.structs.replace(fetched, queue_seconds=fetched.queue_seconds + transfer_seconds)
        return fetched if fetched.predicted_ttft < own.predicted_ttft else own
