"""Why requests were late or rejected for load: one cause each, by the same rules as `explain`, from what was ahead of
them when they were placed and from what their engines then did. Of long logs a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import median

from typing_extensions import override

from pointsman.analysis.client_faults import tells_of_fleet
from pointsman.analysis.lateness_rules import HALF, SLOW_FACTOR_MIN, USUAL_MAX, is_hot, is_less_busy
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import Candidate, RequestPlaced, RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import EMPTY_QUEUE, Request
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.late_causes import advice_for, because
from pointsman_cli.doctor.missed_hits import MissedHits
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import Sample, keep
from pointsman_cli.explain.causes import REFUSALS, Cause, cause_ahead, cause_alone
from pointsman_cli.explain.wait import Wait

LATE_MIN = 5
"""Fewer late requests are left to `explain`."""
LATE_SHARE_MIN = 0.02
IN_FLIGHT_MAX = 20_000
AHEAD_MAX = 256
LOOKED_AT_MAX = 64
"""Engines that the policy did not weigh, asked for a shorter queue."""
NOTICED_SHARE = 0.1
"""Of the SLO: a shorter queue is no reason to look for another engine."""
SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class _Queued:
    """What was ahead of a request when it was placed."""

    ahead: tuple[RequestId, ...] = ()
    seconds: EngineSeconds = 0.0
    longest: EngineSeconds = 0.0
    alike: int = 0
    less_busy: bool = False
    hot: bool = False

    def cause(self, objective: EngineSeconds, wait: Wait) -> Cause:
        return cause_ahead(
            longest=wait.usual * self.longest,
            ahead=wait.ahead,
            objective=objective,
            less_busy=self.less_busy,
            hot=self.hot,
            alike=self.alike / max(1, len(self.ahead)),
        )


NOTHING_AHEAD = _Queued()


@dataclass(frozen=True, slots=True)
class _Late:
    """`cause`: if known already; else all that follows. `wait`: what passed before the last visit."""

    request: RequestId
    cause: Cause | None = None
    wait: Wait = field(default_factory=Wait)
    spent: EngineSeconds = 0.0
    own: EngineSeconds = 0.0
    queued: _Queued = NOTHING_AHEAD
    objective: EngineSeconds = 0.0
    streamed: bool = True
    pace: float = 1.0
    """Of its engine's prefills, as learned by then."""
    log_slow: EngineSeconds = 0.0
    """Of the time until its first token."""


class Lateness(Examiner):
    area = "service"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._level = max(1, settings.affinity_level_tokens // settings.block_tokens)
        self._queued: dict[RequestId, _Queued] = {}
        self._on_the_way: dict[RequestId, tuple[EngineSeconds, EngineSeconds]] = {}
        """From its arrival until its leader had it; of that, for how long no scheduler answered."""
        self._missed = MissedHits()
        self._late: Sample[_Late] = Sample()
        self._ends = 0
        self._rejected = 0
        self._best_effort = 0

    @override
    def before(self, event: LogEvent, state: State) -> None:
        request = state.workload.requests.get(event.request) if isinstance(event, RequestPlaced) else None
        if isinstance(event, RequestPlaced) and request is not None:
            ahead = self._ahead(state, event.instance, request, event.candidates, event.at)
            keep(self._queued, event.request, ahead, IN_FLIGHT_MAX)

    @override
    def after(self, event: LogEvent, state: State) -> None:
        request = state.workload.requests.get(event.request) if isinstance(event, RequestArrived) else None
        if isinstance(event, RequestArrived) and request is not None:
            keep(self._on_the_way, event.request, (event.at - request.arrived_at, event.held_up), IN_FLIGHT_MAX)

    @override
    def ended(self, end: Ended, state: State) -> None:
        self._missed.note(end, state)
        match end.event:
            case RequestFinished() as event if end.request is not None and event.ttft > end.slo_ttft:
                self._finish(event, end.request, end.slo_ttft, state)
            case RequestRejected() as event if tells_of_fleet(event):
                self._reject(event, end.request, end.slo_ttft, state)
            case _:
                pass
        self._ends += _is_judged(end)
        self._queued.pop(end.event.request, None)
        self._on_the_way.pop(end.event.request, None)

    def _ahead(
        self, state: State, instance: InstanceId, request: Request, candidates: Sequence[Candidate], now: EngineSeconds
    ) -> _Queued:
        queue = state.workload.queues.get(instance, EMPTY_QUEUE)
        seconds, _ = queue.work_ahead(now, request.priority)
        pending = (other for other in queue.pending.values() if not other.best_effort)
        waiting = islice(chain(queue.prefill.values(), pending), AHEAD_MAX)
        ahead = [other for other in waiting if other.id != request.id]
        longest = max(ahead, key=lambda other: other.prefill_seconds, default=None)
        place = min(self._level, len(request.keys)) - 1
        key = request.keys[place] if request.keys else None
        ready = len(state.fleet.ready)
        return _Queued(
            ahead=tuple(other.id for other in ahead),
            seconds=seconds,
            longest=longest.prefill_seconds if longest is not None else 0.0,
            alike=sum(len(other.keys) > place and other.keys[place] == key for other in ahead)
            if key is not None
            else 0,
            less_busy=_less_busy_elsewhere(state, instance, candidates, now, request),
            hot=key is not None and is_hot(state.hotness.arrivals_of(key), state.hotness.arrivals, ready),
        )

    def _finish(self, event: RequestFinished, request: Request, slo_ttft: EngineSeconds, state: State) -> None:
        hung = self.hangs.seconds_of(request.id, request.arrived_at, request.arrived_at + event.ttft)
        if hung > HALF * event.ttft:
            self._late.add(_Late(request.id, Cause.TRANSPORT))
            return
        before = request.placed_at - request.arrived_at
        way, held_up = self._on_the_way.get(request.id, (0.0, 0.0))
        peers = [i.id for i in state.fleet.instances if i.id != request.instance and i.role != "decode"]
        others = [state.latency.correction(name) for name in peers]
        wait = Wait(
            held_up=held_up,
            transport=way - held_up,
            failed=before - way if request.attempt > 1 else 0.0,
            unplaced=0.0 if request.attempt > 1 else before - way,
            usual=min(USUAL_MAX, max(1.0, median(others))) if others else 1.0,
        )
        queued = self._queued.get(request.id, NOTHING_AHEAD)
        if request.best_effort:  # until its grant it yields: nothing was ahead of it
            self._best_effort += 1
            wait.yielded, queued = max(0.0, request.granted_at - request.placed_at), NOTHING_AHEAD
        self._late.add(
            _Late(
                request=request.id,
                wait=wait,
                spent=event.ttft - before - wait.yielded,
                own=request.prefill_seconds,
                queued=queued,
                objective=slo_ttft,
                streamed=request.streaming,
                pace=state.latency.correction(request.instance),
                log_slow=self.delays.seconds_within(request.arrived_at, request.arrived_at + event.ttft),
            )
        )

    def _reject(self, event: RequestRejected, request: Request | None, slo_ttft: EngineSeconds, state: State) -> None:
        self._rejected += 1
        if event.reason in REFUSALS:
            self._late.add(_Late(event.request, REFUSALS[event.reason]))
        elif request is not None and event.candidates:
            best = min(event.candidates, key=lambda candidate: candidate.predicted_ttft)
            queued = self._ahead(state, best.instance, request, event.candidates, event.at)
            slow = state.latency.correction(best.instance) > SLOW_FACTOR_MIN * USUAL_MAX
            alone = cause_alone(
                event.reason, queue=best.queue_seconds, predicted_ttft=best.predicted_ttft, objective=slo_ttft
            )
            cause = Cause.SLOW_ENGINE if slow else alone or queued.cause(slo_ttft, Wait(ahead=queued.seconds))
            self._late.add(_Late(event.request, cause))

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        counts, late = self._counts(), self._late.seen
        if late < LATE_MIN or late < LATE_SHARE_MIN * self._ends:
            return
        sampled = sum(map(len, counts.values()))
        cause, examples = next(iter(counts.items()))
        share = len(examples) / sampled
        most = f", {share:.0%} of them" if share < 1 else ""
        how = "late" if not self._rejected else "rejected" if self._rejected == late else "late or rejected"
        evidence = [
            f"{len(found) / sampled:.0%} because {because(other)}: for example request {found[-1]}"
            for other, found in list(counts.items())[:SHOWN_MAX]
        ]
        if self._best_effort:
            evidence.append(
                f"{self._best_effort:,} were late even alone and served as best effort: when others left room"
            )
        yield self.finding(
            Severity.WARNING,
            f"{late:,} of {self._ends:,} requests were {how}{most} because {because(cause)}",
            evidence,
            advice_for(cause),
            cause=cause,
        )

    def _counts(self) -> dict[Cause, list[RequestId]]:
        found: dict[Cause, list[RequestId]] = {}
        for late in self._late.values:
            found.setdefault(late.cause or self._cause_of(late), []).append(late.request)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def _cause_of(self, late: _Late) -> Cause:
        """Of what most of its wait was."""
        queued, wait = late.queued, replace(late.wait)
        missed = sum(map(self._missed.seconds, (late.request, *queued.ahead)))
        excess = wait.share_out(late.spent, own=late.own, missed=missed, ahead=queued.seconds)
        wait.blame_for(excess, log_slow=late.log_slow, is_whole_answer=not late.streamed, learned=late.pace)
        parts = {
            queued.cause(late.objective, wait): wait.ahead,
            Cause.LONG_PROMPT: max(wait.yielded, wait.own if wait.own > late.objective else 0.0),
            Cause.STALE_INDEX: wait.missed,
            Cause.SLOW_ENGINE: wait.slow,
            Cause.LOG_SLOW: wait.log_slow,
            Cause.WHOLE_ANSWER: wait.whole_answer,
            Cause.NO_SCHEDULER: wait.held_up,
            Cause.TRANSPORT: wait.transport,
            Cause.FAILED_ATTEMPTS: wait.failed,
            Cause.NO_INSTANCE: wait.unplaced,
        }
        return max(parts, key=parts.__getitem__)


def _is_judged(end: Ended) -> bool:
    """Failed ones have findings of their own."""
    known = end.request is not None or isinstance(end.event, RequestRejected)
    return known and not isinstance(end.event, RequestFailed | RequestCancelled) and tells_of_fleet(end.event)


def _less_busy_elsewhere(
    state: State, instance: InstanceId, candidates: Sequence[Candidate], now: EngineSeconds, request: Request
) -> bool:
    """Whether an engine that could serve it had a much shorter queue, and would have met its objective."""
    here = state.queue_seconds(instance, now)
    if here <= NOTICED_SHARE * request.slo_ttft:
        return False
    budget = request.deadline - now
    weighed_elsewhere = [c for c in candidates if c.instance != instance]
    if any(is_less_busy(c.queue_seconds, here, in_time=c.predicted_ttft <= budget) for c in weighed_elsewhere):
        return True
    weighed = {candidate.instance for candidate in candidates}
    others = [name for name in state.fleet.ready_for(request, ()) if name not in weighed and name != instance]
    queues = (state.queue_seconds(name, now) for name in others[:LOOKED_AT_MAX])
    return any(is_less_busy(queue, here, in_time=queue <= budget) for queue in queues)
