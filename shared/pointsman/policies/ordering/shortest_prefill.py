"""Shortest prefill first: the least work before a first token goes first, less what a request has waited for.

Source: shortest job first on the predicted prefill of what is not cached, with linear ageing. Best mean waiting time;
bias: against long and cold prompts, which wait until age makes up for their length. Nobody is overtaken by a request
that came more than (the difference of their prefills) / `ageing` later, so nobody starves while `ageing` is positive.
"""

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
    def first(self, line: InstanceQueue, now: Seconds, state: State) -> Request:
        # Everyone ages alike, so `now` takes no part in the comparison.
        return min(line.pending.values(), key=lambda r: r.prefill_seconds + self.ageing * r.arrived_at)
