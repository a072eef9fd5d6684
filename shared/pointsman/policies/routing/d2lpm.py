"""Longest prefix among instances where the client has quantum left. Source: Cao et al., "Locality-aware Fair Scheduling
in LLM Serving" (2025), Algorithm 2: a deficit per client and instance, charged at dispatch and at the end of the
answer; when none is positive, all get quanta until one is.

By default it differs in two points. A dispatch is charged its uncached tokens instead of w_e times all of the prompt,
so that a client pays for the work that it causes. The longest hit is sought among the instances with quantum left;
Algorithm 2 takes the longest match of all instances, and when none of those has quantum left, the shortest queue
without regard to the cache. Ties go to the fewest tokens to compute instead of the shortest queue. `as_published` is
Algorithm 2 to the letter.

Bias: evens out cost per client, not load; meant for `dlpm` order. Limits: ignores queues and speed; between clients
that wait at all |W| instances the bound is 2|W|(U + Q) (Theorem 5.1), and only with `dlpm`."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, bounded
from pointsman.contracts.decisions import Settings
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.deficits import Deficits


@dataclass(frozen=True)
class D2Lpm(RoutingPolicy):
    """`quantum_tokens`: Q of each instance; small spreads, large keeps prefixes together."""

    name: ClassVar[str] = "d2lpm"
    rule: ClassVar[str] = "takes the longest cached prefix and looks at no queue"
    absent: ClassVar[Settings] = {"as_published": False}

    quantum_tokens: float = bounded(4_096.0, POSITIVE)
    output_weight: float = 2.0
    as_published: bool = False

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (Deficits(self.quantum_tokens, self.output_weight, charges_cached=self.as_published),)

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        client, deficits = view.request.tenant, view.tracker(Deficits)
        needed = [deficits.quanta_needed(client, candidate.instance) for candidate in candidates]
        fewest = min(needed)
        affordable = [candidate for candidate, quanta in zip(candidates, needed, strict=True) if quanta == fewest]
        refilled = f"of {len(affordable)} {'after a refill' if fewest else 'with tokens left'}"
        if self.as_published:
            return _shortest_queue(view, candidates, affordable, refilled)
        longest = max(candidate.cached_tokens for candidate in affordable)
        holders = [candidate for candidate in affordable if candidate.cached_tokens == longest]
        least = min(candidate.queued_tokens for candidate in holders)
        chosen = view.familiar([candidate for candidate in holders if candidate.queued_tokens == least])
        return Choice(chosen, f"longest hit, {longest} tokens, {refilled}", candidates)


def _shortest_queue(
    view: PoolView, candidates: list[CandidateEstimate], affordable: list[CandidateEstimate], refilled: str
) -> Choice:
    """Of the longest matchers (of all instances) with quantum left, else of all with quantum left."""
    longest = max(candidate.cached_tokens for candidate in candidates)
    holders = [candidate for candidate in affordable if candidate.cached_tokens == longest]
    shortest = min(candidate.queued_requests for candidate in holders or affordable)
    chosen = view.familiar([candidate for candidate in holders or affordable if candidate.queued_requests == shortest])
    what = f"longest match, {longest} tokens" if holders else "shortest queue, the longest match has no tokens left"
    return Choice(chosen, f"{what}, {refilled}", candidates)
