"""Oldest request of the waiting tenant with the least service. Source: Sheng et al., OSDI'24, Algorithm 2, one counter
per tenant and queue. Bound: two backlogged tenants differ by at most 2U; U = w_p * (longest prompt) + w_q * (output
tokens of one tenant inside the engine). Bias: cached tokens cost like others. Limits: new tenants delay old ones;
ignores deadlines."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.client_service import ClientService
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class VirtualTokenCounter(OrderingPolicy):
    name: ClassVar[str] = "vtc"

    input_weight: float = 1.0
    output_weight: float = 2.0

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ClientService(input_weight=self.input_weight, cached_weight=1.0, output_weight=self.output_weight),)

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        oldest: dict[str, Request] = {}
        for request in queue.pending.values():
            oldest.setdefault(request.tenant, request)
        service = state.tracker(ClientService)
        return min(oldest.values(), key=lambda request: service.balance(request.instance, request.tenant))
