"""Minimum TTFT: the instance where the first token is predicted soonest.

Source: Mooncake's Conductor (FAST'25), Algorithm 1: queue time plus prefill time of what is not cached, and with a
shared tier the transfer of a prefix from another instance. Transfer is considered only where the best holder has more
than `kvcache_balancing_threshold` times the instance's own hit, and used where it is quicker than computing (section
6.2). A transferred prefix counts as held; the transfer counts as queue time.

Bias: greedy; it takes an idle instance over a warm one as soon as recomputing is quicker for this request, and those
behind pay. Limits: with stale load all routers herd to one instance; a transfer is priced by its length alone and must
be done by the engines' own connector.
"""

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class MinTtft(RoutingPolicy):
    """`tie_seconds`: predictions closer than this are equal; the longer own hit, then the familiar instance, wins.
    `transfer_tokens_per_s`: of the shared tier; 0: there is none."""

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
        """Each candidate, or what it becomes by fetching the longest prefix that anyone holds, where that is sooner."""
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
