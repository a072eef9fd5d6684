"""Shortest prefill first, with linear ageing. Source: shortest job first on the predicted uncached prefill; best mean
waiting time. Bias: against long and cold prompts. No request is overtaken by one that came more than (difference of
prefills) / `ageing` later."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class ShortestPrefill(OrderingPolicy):
    """`ageing`: prefill seconds that a second of waiting makes up for; 0 is the textbook's, which starves."""

    name: ClassVar[str] = "shortest_prefill"

    ageing: float = 0.05

    @override
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        # Everyone ages alike, so `now` takes no part in the comparison.
        return min(queue.pending.values(), key=lambda r: r.prefill_seconds + self.ageing * r.arrived_at)
