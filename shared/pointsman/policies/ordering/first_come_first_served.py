"""In the order of placement. Bias: a long prompt delays all behind it. Limit: past saturation all requests are late."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class FirstComeFirstServed(OrderingPolicy):
    name: ClassVar[str] = "fcfs"

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        return next(iter(queue.pending.values()))
