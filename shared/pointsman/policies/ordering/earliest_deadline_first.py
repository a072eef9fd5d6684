"""Earliest deadline first: by arrival plus TTFT SLO; equal deadlines keep their order. Source: Liu and Layland, 1973.
Optimal while all deadlines can be met. Bias: under overload it spends itself on requests that are late already."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class EarliestDeadlineFirst(OrderingPolicy):
    name: ClassVar[str] = "edf"

    @override
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        return min(queue.pending.values(), key=lambda request: request.deadline)
