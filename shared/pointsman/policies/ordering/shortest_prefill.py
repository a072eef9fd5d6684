"""Shortest uncached prefill first, with linear ageing: best mean waiting time. Bias: against long and cold prompts; a
request that came more than (difference of prefills) / `ageing` later overtakes none."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class ShortestPrefill(OrderingPolicy):
    """`ageing`: prefill seconds that a second of waiting outweighs; 0 starves."""

    name: ClassVar[str] = "shortest_prefill"

    ageing: float = 0.05

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        # Everyone ages alike, so `now` takes no part in the comparison.
        return min(queue.pending.values(), key=lambda r: r.prefill_seconds + self.ageing * r.arrived_at)
