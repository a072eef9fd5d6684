"""Virtual token counter: the waiting tenant with the least service goes first, its oldest request first.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI'24, Algorithm 2, one counter per tenant and
queue. Bound: of two tenants that both wait all the time, neither gets more than 2U more than the other; U = w_p *
(longest prompt) + w_q * (output tokens of one tenant inside the engine).

Bias: cached tokens cost as much as others, so locality earns nothing. Limit: with endlessly new tenants an old one can
wait long; lateness is not considered.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.client_service import ClientService
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class VirtualTokenCounter(OrderingPolicy):
    """Weights of a prompt token (`w_p`) and of a generated one (`w_q`)."""

    name: ClassVar[str] = "vtc"

    input_weight: float = 1.0
    output_weight: float = 2.0

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ClientService(input_weight=self.input_weight, cached_weight=1.0, output_weight=self.output_weight),)

    @override
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        oldest: dict[str, Request] = {}
        for request in queue.pending.values():
            oldest.setdefault(request.tenant, request)
        service = state.tracker(ClientService)
        return min(oldest.values(), key=lambda request: service.balance(request.instance, request.tenant))
