"""Checks a planned move on the leader's newer State: the request must still be pending at its source, and the target
must be able to take it and meet its SLO sooner than the source. Cost: one index look-up per move, one pass over each
source queue. Limit: estimates queues as FCFS."""

from dataclasses import dataclass
from itertools import accumulate

from pointsman.contracts.reasons import MoveRefusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.rebalancing.base import Migration
from pointsman.policies.stall_detection import stalled_seconds
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, plain_sum
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage

NEVER = float("inf")
ROUNDING_SECONDS: EngineSeconds = 1e-6


@dataclass(frozen=True, slots=True)
class Veto:
    reason: MoveRefusal
    detail: str


class MigrationCheck:
    """Checks the moves of one plan; each sees the effect of those before it."""

    def __init__(self, state: State, now: EngineSeconds) -> None:
        self._state = state
        self._now = now
        self._queues: dict[InstanceId, _Queue] = {}

    def judge(self, migration: Migration) -> CandidateEstimate | Veto:
        """Returns the offer of the target, after which the move counts as made, or a Veto."""
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
        if request.id not in queue:
            return Veto(MoveRefusal.ELSEWHERE, "this plan has moved it there")
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
    def __init__(self, state: State, source: InstanceId, now: EngineSeconds) -> None:
        waiting, expected = state.workload.queues[source], state.latency.expected_seconds
        self._work = {r.id: expected(source, r.prefill_seconds, r.uncached_tokens) for r in waiting.pending.values()}
        begins = expected(source, *waiting.engine_left(now)) + stalled_seconds(waiting, now, after=0.0)
        if source not in state.fleet.ready:
            begins = NEVER
        ends = list(accumulate(self._work.values(), initial=begins))
        self._ends = dict(zip(self._work, enumerate(ends[1:]), strict=True))
        self._given: list[tuple[int, EngineSeconds]] = []

    def __contains__(self, request: RequestId) -> bool:
        return request in self._ends

    def expected(self, request: RequestId) -> EngineSeconds:
        place, end = self._ends[request]
        return end - plain_sum(work for before, work in self._given if before < place)

    def give(self, request: RequestId) -> None:
        self._given.append((self._ends[request][0], self._work[request]))
