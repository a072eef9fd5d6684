"""Longest cached prefix among tenants with quantum left. Source: Cao et al., "Locality-aware Fair Scheduling in LLM
Serving", Algorithm 1. Bound (Theorem 5.1): two backlogged tenants differ by at most 2(U + Q); U = w_e * (most tokens to
compute at once) + w_q * (output tokens of one tenant inside the engine). Bias: a large quantum is LPM, a small one
takes turns. Limits: ignores deadlines."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

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

    quantum_tokens: float = 1_024.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    ageing_tokens: float = 50.0

    def __post_init__(self) -> None:
        if self.quantum_tokens <= 0:
            message = f"quantum_tokens must be positive, not {self.quantum_tokens}"
            raise ValueError(message)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        deficits = QueueDeficits(
            quantum=self.quantum_tokens, input_weight=self.input_weight, output_weight=self.output_weight
        )
        return (deficits,)

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        pending = queue.pending.values()
        instance = next(iter(pending)).instance
        tenants = state.tracker(QueueDeficits).in_turn(instance, {request.tenant for request in pending})
        return longest_match((r for r in pending if r.tenant in tenants), state, self.ageing_tokens)
