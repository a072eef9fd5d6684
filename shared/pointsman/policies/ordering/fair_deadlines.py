"""Fair deadlines, our default: the earliest deadline that can still be met, of tenants at most `lead_tokens_max` of weighted
service (`trackers.client_service`) ahead of the last one; within `tie_seconds`, the longest cached prefix. Neither
fairness nor a prefix makes a request late that was placed to be on time and still can be (decision 91): admission counted
on its place, and first tokens of a step come at its end. Late requests get `late_share` of the work, oldest first
(`trackers.late_turns`). Bound (Theorem 4.1 of Cao et al.): two backlogged tenants differ by at most
2(U + lead_tokens_max), U as in `dlpm`, and the service of requests that were placed to be on time. Bias: compares service
within one queue. Limits: under overload it needs admission, as EDF does; without, take a quarter of the lead."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.ordering.longest_prefix_match import longest_match
from pointsman.primitives import EngineSeconds
from pointsman.state import fold_versions
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
        pending = queue.pending.values()
        fair = self._within_lead(pending, state)
        on_time, late = turns.split(fair, queue, now)
        ahead: list[Request] = []
        keeps = state.settings.fold_version >= fold_versions.PREDICTIONS_KEPT
        if keeps and len(fair) < len(pending):
            within = {request.id for request in fair}
            promised = [request for request in pending if request.id not in within and _was_to_be_on_time(request)]
            ahead, _ = turns.split(promised, queue, now)
        instance = next(iter(pending)).instance
        if late and (turns.due(instance) or not (on_time or ahead)):
            return min(late, key=_deadline)
        margin = state.latency.margin_seconds(instance, inf) if keeps else 0.0
        waiting = _Waiting(now, queue.engine_seconds_left(now), turns.factor(instance), margin)
        urgent = self._urgent(on_time, ahead, waiting)
        return urgent[0] if len(urgent) == 1 else longest_match(urgent, state)

    def _within_lead(self, pending: Collection[Request], state: State) -> Collection[Request]:
        tenants = {request.tenant for request in pending}
        if len(tenants) == 1:
            return pending
        instance = next(iter(pending)).instance
        services = state.tracker(ClientService).services(instance, tenants)
        most = min(services.values()) + self.lead_tokens_max
        return [request for request in pending if services[request.tenant] <= most]

    def _urgent(self, on_time: list[Request], ahead: list[Request], waiting: "_Waiting") -> list[Request]:
        """Among which the longest prefix wins. `ahead`: of tenants that are too far ahead; they go first only where
        nobody else may."""
        latest = inf if ahead else min(map(_deadline, on_time)) + self.tie_seconds
        ordered = sorted([request for request in (*on_time, *ahead) if request.deadline <= latest], key=_deadline)
        able = list(waiting.may_go_first(ordered))
        set_aside = {request.id for request in ahead}
        able = [request for request in able if request.id not in set_aside] or able
        latest = able[0].deadline + self.tie_seconds
        return [request for request in able if request.deadline <= latest]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """For one engine. `before`: seconds of work inside it; `factor`: on predicted seconds; `margin`: by which a first token
    may come later than predicted."""

    now: EngineSeconds
    before: EngineSeconds
    factor: float
    margin: EngineSeconds

    def may_go_first(self, ordered: list[Request]) -> Iterator[Request]:
        """Requests that make no overtaken one late. `ordered`: by deadline."""
        spare = inf
        seconds = self.before
        for request in ordered:
            if request.prefill_seconds <= spare:
                yield request
            seconds += request.prefill_seconds
            spare = min(spare, (request.deadline - self.now - self.margin) / self.factor - seconds)


def _deadline(request: Request) -> EngineSeconds:
    return request.deadline


def _was_to_be_on_time(request: Request) -> bool:
    return request.placed_at + request.predicted_ttft <= request.deadline
