"""D2LPM: the longest prefix among the instances where the client has quantum left.

Source: "Locality-aware Fair Scheduling in LLM Serving" (2025), Algorithm 2. Each client has a deficit counter per
instance, charged with the tokens to compute at dispatch and `output_weight` times the generated ones at the end. The
longest hit among positive counters wins; where none is positive, all of the client's get quanta of `quantum_tokens`
until one is. Equal hits, which the paper leaves open, go to the least loaded instance, so that clients do not move in
step.

Bias: evens out what each client costs each instance, not the load; meant for `dlpm` order. The default quantum is the
work of one or two prompts. Limits: ignores queues and speed; a placement by another policy may refill early; a client
with many names is many clients.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.deficits import Deficits


@dataclass(frozen=True)
class D2Lpm(RoutingPolicy):
    """`quantum_tokens`: small spreads, large keeps prefixes together. `output_weight`: cost of a generated token in
    prompt tokens."""

    name: ClassVar[str] = "d2lpm"

    quantum_tokens: float = 4_096.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        if self.quantum_tokens <= 0:
            msg = f"quantum_tokens must be above 0, not {self.quantum_tokens}"
            raise ValueError(msg)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (Deficits(self.quantum_tokens, self.output_weight),)

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        client, deficits = view.request.tenant, view.tracker(Deficits)
        needed = [deficits.quanta_needed(client, candidate.instance) for candidate in candidates]
        fewest = min(needed)
        affordable = [candidate for candidate, quanta in zip(candidates, needed, strict=True) if quanta == fewest]
        longest = max(candidate.cached_tokens for candidate in affordable)
        chosen = _least_loaded(view, [candidate for candidate in affordable if candidate.cached_tokens == longest])
        refilled = "after a refill" if fewest else "with tokens left"
        return Choice(chosen, f"longest hit, {longest} tokens, of {len(affordable)} {refilled}", candidates)


def _least_loaded(view: PoolView, equals: list[CandidateEstimate]) -> CandidateEstimate:
    least = min(candidate.load_tokens for candidate in equals)
    return view.familiar([candidate for candidate in equals if candidate.load_tokens == least])
