"""Minimum TTFT: the instance where the first token is predicted soonest.

Source: Mooncake's Conductor (FAST'25), Algorithm 1: queue time plus prefill time of what is not cached, and where a
shared tier exists, the transfer of a prefix that another instance holds. As in the paper, transfer is looked at only
where the best holder has more than `kvcache_balancing_threshold` times what the instance has itself; it is taken
where it is quicker than computing (its section 6.2).

A transferred prefix counts as held in the `ScoredInstance`: its hit and cached tokens are the best holder's, its prefill
(seconds, work and uncached tokens) is only what is then left to compute, so that nothing is booked on the engine that
the engine will not do; the transfer, which leaves the engine free, counts as part of the queue time.

Bias: greedy; it takes an idle instance over a warm one as soon as recomputing is quicker for this request, and
everyone behind pays for the recomputation. Limits: with stale load all routers herd to one instance; a transfer is
priced by its length alone, not by how busy the sender is; the engines' own connector must do it, we only count on it.
"""

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from typing_extensions import override

from pointsman.policies.pool_view import PoolView, ScoredInstance
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of


@dataclass(frozen=True)
class MinTtft(RoutingPolicy):
    """`tie_seconds`: predictions closer than this are equal, and the longer own hit, then the familiar one, wins.

    `transfer_tokens_per_s`: how fast engines fetch a prefix from the shared tier; 0 where there is none.
    """

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

    def _with_transfers(self, view: PoolView, held: list[ScoredInstance]) -> list[ScoredInstance]:
        """Each candidate, or what it becomes by fetching the longest prefix that anyone holds, where that is sooner."""
        best = max(held, key=lambda candidate: candidate.cached_tokens)
        return [
            self._sooner(view, own, best)
            if best.cached_tokens > self.kvcache_balancing_threshold * own.cached_tokens
            else own
            for own in held
        ]

    def _sooner(self, view: PoolView, own: ScoredInstance, best: ScoredInstance) -> ScoredInstance:
        fetched = view.candidate(own.instance, hit_blocks=best.hit_blocks)
        transfer_seconds = (fetched.cached_tokens - own.cached_tokens) / self.transfer_tokens_per_s
        fetched = msgspec.structs.replace(fetched, queue_seconds=fetched.queue_seconds + transfer_seconds)
        return fetched if fetched.predicted_ttft < own.predicted_ttft else own
