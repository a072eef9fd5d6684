"""Whether a planned move still holds on the leader's newer state.

The request must still wait where the plan found it, and the target must take it and give it its first token in time and
sooner than its source. The plan's own benefit is not trusted. Cost: one index look-up a move, one pass over the queue
of each source. Limit: estimates queues as first come, first served.
"""

from dataclasses import dataclass
from itertools import accumulate

from pointsman.contracts.reasons import MoveRefusal
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.policies.rebalancing.base import Migration
from pointsman.policies.stall_detection import stalled_seconds
from pointsman.primitives import InstanceId, RequestId, Seconds
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage

NEVER = float("inf")
ROUNDING_SECONDS: Seconds = 1e-6
"""Two sums of the same seconds in another order may differ by this."""


@dataclass(frozen=True, slots=True)
class Veto:
    """Why a move is not made. `detail` is for people."""

    reason: MoveRefusal
    detail: str


class MigrationCheck:
    """One plan, looked at again move by move, each after the one before was made or refused."""

    def __init__(self, state: State, now: Seconds) -> None:
        self._state = state
        self._now = now
        self._queues: dict[InstanceId, _Queue] = {}

    def judge(self, migration: Migration) -> CandidateEstimate | Veto:
        """What the target offers now, or why the request should stay. A move that is offered is then to be made."""
        request = self._state.workload.requests.get(migration.request)
        if request is None:
            return Veto(MoveRefusal.NOT_WAITING, "it has ended")
        if request.stage is not Stage.PENDING:
            return Veto(MoveRefusal.NOT_WAITING, f"it is {request.stage} at {request.instance}")
        if request.instance != migration.source:
            return Veto(MoveRefusal.ELSEWHERE, f"it waits for {request.instance}")
        if migration.target not in self._state.fleet.ready_for(request):
            return Veto(MoveRefusal.TARGET_UNAVAILABLE, f"{migration.target} takes no such requests")
        if migration.target in self._state.fleet.on_trial:
            return Veto(MoveRefusal.TARGET_UNAVAILABLE, f"{migration.target} is half-open after its ejection")
        if migration.target in request.excluded:
            return Veto(MoveRefusal.TARGET_UNAVAILABLE, f"{migration.target} has failed it before")
        return self._compare(request, migration)

    def _compare(self, request: Request, migration: Migration) -> CandidateEstimate | Veto:
        queue = self._queue(migration.source)
        offered = PoolView(self._state, request, self._now).candidate(migration.target)
        there, here, left = offered.predicted_ttft, queue.expected(request.id), request.deadline - self._now
        if there > left + ROUNDING_SECONDS:
            return Veto(MoveRefusal.TARGET_LATE, f"first token there in {there:.2f} s, {left:.2f} s are left")
        if there >= here or migration.target == migration.source:
            return Veto(MoveRefusal.NO_GAIN, f"first token there in {there:.2f} s, here in {here:.2f} s")
        queue.give(request.id)
        return offered

    def _queue(self, source: InstanceId) -> "_Queue":
        queue = self._queues.get(source)
        if queue is None:
            queue = self._queues[source] = _Queue(self._state, source, self._now)
        return queue


class _Queue:
    """When each request of a queue is expected to have its first token, seconds from now."""

    def __init__(self, state: State, source: InstanceId, now: Seconds) -> None:
        waiting, expected = state.workload.queues[source], state.latency.expected_seconds
        self._work = {r.id: expected(source, r.prefill_seconds, r.uncached_tokens) for r in waiting.pending.values()}
        begins = expected(source, *waiting.engine_left(now)) + stalled_seconds(waiting, now, after=0.0)
        if source not in state.fleet.ready:
            begins = NEVER
        ends = list(accumulate(self._work.values(), initial=begins))
        self._ends = dict(zip(self._work, enumerate(ends[1:]), strict=True))
        self._given: list[tuple[int, Seconds]] = []

    def expected(self, request: RequestId) -> Seconds:
        place, end = self._ends[request]
        return end - sum(work for before, work in self._given if before < place)

    def give(self, request: RequestId) -> None:
        """One request leaves: those behind it come earlier."""
        self._given.append((self._ends[request][0], self._work[request]))
