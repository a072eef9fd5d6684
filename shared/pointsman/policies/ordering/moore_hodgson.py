"""As many first tokens on time as possible. Source: Moore, 1968 (1 || sum U_j): take requests by deadline; if the last
one would be late, set aside the longest prefill taken. Bias: sets long prompts aside; late ones get `late_share` of the
work, oldest first. Limit: does not know arrivals."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import SHARE, bounded
from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.late_turns import LateCredit
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class MooreHodgson(OrderingPolicy):
    name: ClassVar[str] = "moore_hodgson"

    late_share: float = bounded(0.05, SHARE)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (LateCredit(late_share=self.late_share),)

    @override
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        turns = state.tracker(LateCredit)
        on_time, late = turns.split(queue.pending.values(), queue, now)
        instance = (on_time or late)[0].instance
        if late and (not on_time or turns.due(instance)):
            return min(late, key=lambda request: request.deadline)
        kept = most_on_time(on_time, now, queue.engine_seconds_left(now), turns.factor(instance))
        return (kept or on_time)[0]


def most_on_time(
    requests: Iterable[Request], now: EngineSeconds, before: EngineSeconds, factor: float
) -> list[Request]:
    """`before`: prefill seconds inside the engine. `factor` corrects all prefill seconds."""
    taken: list[tuple[EngineSeconds, int, Request]] = []
    seconds = before
    for order, request in enumerate(sorted(requests, key=lambda request: request.deadline)):
        heappush(taken, (-request.prefill_seconds, -order, request))
        seconds += request.prefill_seconds
        if now + seconds * factor > request.deadline:
            seconds += heappop(taken)[0]
    return [request for _, _, request in sorted(taken, key=lambda entry: -entry[1])]
