"""Longest cached prefix among tenants with quantum left. Source: Cao et al., "Locality-aware Fair Scheduling in LLM
Serving" (2025), Algorithm 1.

Bounds for one instance, with U = w_e * (most tokens to compute at once) + w_q * (output tokens of one tenant inside the
engine): two tenants that both wait differ by at most 2(U + Q) (Theorem 4.1); a tenant that waits gets at most 2(U + Q)
less than any other (Theorem 4.2). With `d2lpm`, over |W| instances: 2|W|(U + Q) (Theorems 5.1 and 5.2).

By default it differs in two points. A tenant that waits again keeps its balance; Algorithm 1 (line 12) sets it to 0.
Then n - 1 others get at most (n - 1)(U + 2Q) before its first grant (latency, Theorems A.2 and A.4) instead of
2(n - 1)(U + Q), but who waits with one long request at a time leaves its debts behind, and Theorem 4.2 no longer holds
for it. And `ageing_tokens` lets old requests overtake. `as_published` is Algorithm 1 to the letter in both. Output is
charged at the end of an answer, since the log has no steps; the vLLM plug-in (`pointsman_vllm.dlpm`) charges each step.

Bias: a large quantum is LPM (no bound at all when it is infinite, section A.5), a small one takes turns. Limits:
ignores deadlines."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, bounded
from pointsman.contracts.decisions import Settings
from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.ordering.longest_prefix_match import longest_match
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.queue_deficits import QueueDeficits
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class DeficitLongestPrefixMatch(OrderingPolicy):
    """`quantum_tokens` is Q, `input_weight` w_e, `output_weight` w_q; `ageing_tokens` as in `lpm`."""

    name: ClassVar[str] = "dlpm"
    absent: ClassVar[Settings] = {"as_published": False}

    quantum_tokens: float = bounded(1_024.0, POSITIVE)
    input_weight: float = 1.0
    output_weight: float = 2.0
    ageing_tokens: float = 50.0
    as_published: bool = False
    """`ageing_tokens` is not used."""

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        deficits = QueueDeficits(
            quantum=self.quantum_tokens,
            input_weight=self.input_weight,
            output_weight=self.output_weight,
            forgives=self.as_published,
        )
        return (deficits,)

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        pending = queue.pending.values()
        instance = next(iter(pending)).instance
        tenants = state.tracker(QueueDeficits).in_turn(instance, {request.tenant for request in pending})
        ageing_tokens = 0.0 if self.as_published else self.ageing_tokens
        return longest_match((r for r in pending if r.tenant in tenants), state, ageing_tokens)
