"""First come, first served: in the order of placement.

Source: folklore. Bias: one long prompt delays all behind it. Limit: past saturation everyone is late.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class FirstComeFirstServed(OrderingPolicy):
    name: ClassVar[str] = "fcfs"

    @override
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        return next(iter(queue.pending.values()))
