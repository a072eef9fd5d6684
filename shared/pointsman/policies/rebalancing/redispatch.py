"""Redispatch (`--rebind`): abort an overdue request in its engine before its first token and start it elsewhere, at
most once. Our own. Benefit: what is left at the source by the cost model, plus as long again as it is overdue, less
queue and prefill at the target and the work lost. The target needs room in its window and no pending requests. Limits:
non-streamed requests leave it once their prefill is assumed over; split requests stay."""

from collections.abc import Collection
from dataclasses import dataclass

from pointsman.contracts.reasons import MoveRefusal
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.pool_view import PoolView
from pointsman.policies.queue_limits import PREFILL_WINDOW_TOKENS, RUNNING_MAX
from pointsman.policies.rebalancing.base import Migration
from pointsman.policies.rebalancing.migration_check import Veto
from pointsman.policies.stall_detection import stalled_seconds
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.fleet import Status
from pointsman.state.fold_versions import FETCHES_THAT_PAY
from pointsman.state.outliers import OVERDUE_SECONDS
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request, Stage

GAIN_SECONDS_MIN: EngineSeconds = 1.0
REBOUND_MAX = 8
"""Redispatched requests of a pool without a first token."""


@dataclass(frozen=True, slots=True)
class Window:
    tokens: Tokens = PREFILL_WINDOW_TOKENS
    running_max: int = RUNNING_MAX


@dataclass(frozen=True, slots=True)
class Redispatch:
    """Seconds. `overdue`: past the expected first token. `wasted`: prefill lost. `benefit`: TTFT won beyond that."""

    candidate: CandidateEstimate
    overdue: EngineSeconds
    wasted: EngineSeconds
    benefit: EngineSeconds


class Redispatching:
    """For one State and time: planning on an older, judging on a newer State."""

    def __init__(self, state: State, now: EngineSeconds, window: Window) -> None:
        self._state = state
        self._now = now
        self._window = window

    def plan(self, *, busy: Collection[InstanceId] = ()) -> list[Migration]:
        """By descending benefit, one per target. `busy`: no targets."""
        overdue = [request for request in self._in_engines() if self._overdue(request) is not None]
        room = REBOUND_MAX - self._in_flight() if overdue else 0
        offers = [(request, redispatch) for request in overdue if (redispatch := self._best(request, busy)) is not None]
        offers.sort(key=lambda offer: (-offer[1].benefit, offer[0].id))
        moves: dict[InstanceId, Migration] = {}
        for request, redispatch in offers:
            if len(moves) < room:
                moves.setdefault(redispatch.candidate.instance, self._move(request, redispatch))
        return list(moves.values())

    def judge(self, migration: Migration) -> Redispatch | Veto:
        request = self._state.workload.requests.get(migration.request)
        if request is None:
            return Veto(MoveRefusal.NOT_WAITING, "it has ended")
        if request.rebound_from:
            return Veto(MoveRefusal.REBOUND_BEFORE, f"it was taken out of {request.rebound_from} before")
        if request.stage is not Stage.PREFILL:
            return Veto(MoveRefusal.NOT_WAITING, f"it is {request.stage} at {request.instance}")
        if request.instance != migration.source:
            return Veto(MoveRefusal.ELSEWHERE, f"it is in {request.instance}")
        if not _may_leave(request):
            return Veto(MoveRefusal.BOUND, "its ingress does not ask where it is to go")
        return self._judge_target(request, migration.target)

    def _judge_target(self, request: Request, target: InstanceId) -> Redispatch | Veto:
        if self._in_flight() >= REBOUND_MAX:
            return Veto(MoveRefusal.TOO_MANY_REBOUND, f"{REBOUND_MAX} are under way")
        if not self._takes(request, target):
            return Veto(MoveRefusal.TARGET_UNAVAILABLE, f"{target} does not take it")
        candidate = self._view(request).candidate(target)
        if not self._has_room(candidate):
            return Veto(MoveRefusal.TARGET_FULL, f"{target} could not begin it at once")
        redispatch = self._compare(request, candidate)
        if redispatch is None:
            return Veto(MoveRefusal.NOT_OVERDUE, "its first token is not overdue")
        if redispatch.benefit < GAIN_SECONDS_MIN:
            return Veto(
                MoveRefusal.NO_GAIN,
                f"{redispatch.benefit:.2f} s sooner, {redispatch.wasted:.2f} s of work lost counted",
            )
        return redispatch

    def _view(self, request: Request) -> PoolView:
        """Its ingress goes on with the exchange at the target, and fetches nothing."""
        fetches = self._state.settings.fold_version < FETCHES_THAT_PAY
        return PoolView(self._state, request, self._now, fetches=fetches)

    def _in_engines(self) -> list[Request]:
        return [
            request
            for queue in self._state.workload.queues.values()
            for request in queue.prefill.values()
            if _may_leave(request)
        ]

    def _in_flight(self) -> int:
        return sum(
            bool(r.rebound_from) for queue in self._state.workload.queues.values() for r in queue.prefill.values()
        )

    def _best(self, request: Request, busy: Collection[InstanceId]) -> Redispatch | None:
        view = self._view(request)
        best: Redispatch | None = None
        for instance in self._state.fleet.ready:
            if instance in busy or not self._takes(request, instance):
                continue
            candidate = view.candidate(instance)
            redispatch = self._compare(request, candidate) if self._has_room(candidate) else None
            if redispatch is not None and redispatch.benefit >= (best.benefit if best else GAIN_SECONDS_MIN):
                best = redispatch if best is None or redispatch.benefit > best.benefit else best
        return best

    def _takes(self, request: Request, target: InstanceId) -> bool:
        fleet = self._state.fleet
        if target == request.instance or target in request.excluded or target not in fleet.ready:
            return False
        if target in fleet.on_trial:
            return False
        return fleet[target].can_serve(request) and fleet[target].role == "both"

    def _has_room(self, candidate: CandidateEstimate) -> bool:
        queue, window = self._state.workload.queues.get(candidate.instance), self._window
        if queue is None:
            return True
        room = queue.has_room(candidate.uncached_tokens, window_tokens=window.tokens, running_max=window.running_max)
        return room and not queue.pending

    def _compare(self, request: Request, candidate: CandidateEstimate) -> Redispatch | None:
        overdue = self._overdue(request)
        if overdue is None:
            return None
        left, wasted = self._at_source(request)
        queue = self._state.workload.queues.get(candidate.instance)
        there = candidate.predicted_ttft + (stalled_seconds(queue, self._now, after=0.0) if queue else 0.0)
        return Redispatch(candidate, overdue, wasted, left + overdue - there - wasted)

    def _overdue(self, request: Request) -> EngineSeconds | None:
        state, instance = self._state, self._state.fleet.get(request.instance)
        expected = state.latency.expected_seconds(request.instance, request.engine_seconds, request.engine_tokens)
        expected += state.latency.step_seconds(request.instance)
        overdue = self._now - request.granted_at - expected - request.load_seconds
        answers = instance is not None and instance.status in (Status.READY, Status.DRAINING)
        return overdue if overdue > (OVERDUE_SECONDS if answers else 0.0) else None

    def _at_source(self, request: Request) -> tuple[EngineSeconds, EngineSeconds]:
        """Returns expected seconds to its first token, and those its prefill has taken so far."""
        state, source = self._state, request.instance
        queue = state.workload.queues[source]
        seconds, tokens = _up_to(queue, request)
        first = next(iter(queue.prefill.values()))
        done = min(first.prefill_seconds, max(0.0, self._now - queue.working_since))
        done_tokens = int(first.uncached_tokens * (done / first.prefill_seconds)) if first.prefill_seconds else 0
        left = state.latency.expected_seconds(source, max(0.0, seconds - done), tokens - done_tokens)
        return left, state.latency.expected_seconds(source, done, done_tokens) if first is request else 0.0

    def _move(self, request: Request, redispatch: Redispatch) -> Migration:
        target, benefit = redispatch.candidate.instance, redispatch.benefit
        return Migration(
            request=request.id,
            source=request.instance,
            target=target,
            benefit=benefit,
            reason=f"its first token from {request.instance} is overdue; starting again is {benefit:.2f} s sooner",
            rebind=True,
        )


def _may_leave(request: Request) -> bool:
    return request.rebind and not request.rebound_from and not request.decode and not request.prefilled_by


def _up_to(queue: InstanceQueue, request: Request) -> tuple[EngineSeconds, Tokens]:
    """Prefill inside the engine up to this request, uncorrected, and its uncached tokens."""
    seconds, tokens = 0.0, 0
    for known in queue.prefill.values():
        seconds += known.prefill_seconds
        tokens += known.uncached_tokens
        if known is request:
            break
    return seconds, tokens
