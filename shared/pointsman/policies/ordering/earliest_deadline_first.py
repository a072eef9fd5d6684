"""Earliest deadline (arrival plus TTFT SLO) first. Source: Liu and Layland, 1973. Optimal if all deadlines can be met.
Bias: under overload it serves late requests first."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class EarliestDeadlineFirst(OrderingPolicy):
    name: ClassVar[str] = "edf"

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        return min(queue.pending.values(), key=lambda request: request.deadline)
