"""Fair deadlines, our default: the earliest deadline that can still be met; within `tie_seconds`, the longest cached
prefix that makes no overtaken request late. Only tenants at most `lead_tokens_max` of weighted service
(`trackers.client_service`) ahead of the last one count. Late requests get `late_share` of the work, oldest first
(`trackers.late_turns`). Bound (Theorem 4.1 of Cao et al.): two backlogged tenants differ by at most 2(U +
lead_tokens_max), U as in `dlpm`. Bias: compares service within one queue. Limits: under overload it needs admission, as
EDF does; without, take a quarter of the lead."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.ordering.longest_prefix_match import longest_match
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.client_service import ClientService
from pointsman.state.trackers.late_turns import LateCredit
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class FairDeadlines(OrderingPolicy):
    name: ClassVar[str] = "fair_edf"

    lead_tokens_max: float = 16_384.0
    input_weight: float = 1.0
    output_weight: float = 2.0
    late_share: float = bounded(0.05, SHARE)
    tie_seconds: float = 0.25

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        service = ClientService(input_weight=self.input_weight, cached_weight=0.0, output_weight=self.output_weight)
        return (service, LateCredit(late_share=self.late_share))

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        turns = state.tracker(LateCredit)
        fair = self._within_lead(queue.pending.values(), state)
        on_time, late = turns.split(fair, queue, now)
        instance = (on_time or late)[0].instance
        if late and (not on_time or turns.due(instance)):
            return min(late, key=lambda request: request.deadline)
        return self._most_urgent(on_time, queue, now, turns.factor(instance), state)

    def _within_lead(self, pending: Collection[Request], state: State) -> Collection[Request]:
        tenants = {request.tenant for request in pending}
        if len(tenants) == 1:
            return pending
        instance = next(iter(pending)).instance
        services = state.tracker(ClientService).services(instance, tenants)
        most = min(services.values()) + self.lead_tokens_max
        return [request for request in pending if services[request.tenant] <= most]

    def _most_urgent(
        self, on_time: list[Request], queue: InstanceQueue, now: EngineSeconds, factor: float, state: State
    ) -> Request:
        deadlines = [request.deadline for request in on_time]
        latest = min(deadlines) + self.tie_seconds
        near = [request for request, deadline in zip(on_time, deadlines, strict=True) if deadline <= latest]
        if len(near) == 1:
            return near[0]
        near.sort(key=lambda request: request.deadline)
        return longest_match(_may_go_first(near, queue.engine_seconds_left(now), now, factor), state)


def _may_go_first(
    ordered: list[Request], before: EngineSeconds, now: EngineSeconds, factor: float
) -> Iterator[Request]:
    """Requests that make no overtaken one late. `ordered`: by deadline."""
    spare = inf
    seconds = before
    for request in ordered:
        if request.prefill_seconds <= spare:
            yield request
        seconds += request.prefill_seconds
        spare = min(spare, (request.deadline - now) / factor - seconds)
