"""The state behind each decision about a request: the log is folded in the order of each leader that decided
(`LeaderOrder`), which gives, bit for bit, the state it decided from."""

from collections.abc import Iterable, Iterator
from statistics import median

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    Candidate,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    is_final_end,
)
from pointsman.contracts.requests import PrefillFinished, RequestFinished, cached_of_keys
from pointsman.policies.pool_view import PoolView
from pointsman.ports import LogEntry
from pointsman.primitives import Answers, EngineSeconds, InstanceId, RequestId, Sequence, Term, Tokens
from pointsman.simulation.replay.folding import copy_state, entries_after
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder
from pointsman.state.fleet import Status
from pointsman.state.instance_status import ejection_reason
from pointsman.state.priority_classes import LOWEST, RANK
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import EMPTY_QUEUE, Request, Stage
from pointsman_cli.explain.prefills import prefilled
from pointsman_cli.explain.values import (
    NOT_KNOWN,
    UNSUITED,
    DecisionRecord,
    GrantRecord,
    PeerPrefills,
    PrefixFacts,
    QueuedAhead,
    RequestTimeline,
    WeighedCandidate,
    soonest,
)

Decision = RequestPlaced | RequestRejected | RequestMigrated
HELD_MAX = 4096


def add_decisions(
    timeline: RequestTimeline,
    points: list[LogEntry],
    entries: Iterable[LogEntry],
    settings: PoolSettings,
    base: State | None,
) -> None:
    """Add decisions, grants and peer prefills to the timeline. `base`: start state, if the log lost its beginning."""
    position = _QueuePosition()
    for term, group in _by_term(points):
        reading = iter(entries if base is None else entries_after(base.sequence, entries))
        leader_fold = _LeaderFold(timeline, State(settings) if base is None else copy_state(base), term, position)
        leader_fold.read(reading, {point.sequence: point for point in group})
        if group[-1] is points[-1]:
            leader_fold.read_on(reading)


def _by_term(points: list[LogEntry]) -> list[tuple[Term, list[LogEntry]]]:
    """Grants by an ingress alone have no term; they go with the decision before them, else the next."""
    groups: list[tuple[Term, list[LogEntry]]] = []
    for point in points:
        term = point.event.stamp.term if point.event and point.event.stamp else Term(0)
        if groups and (not term or groups[-1][0] in (term, 0)):
            groups[-1] = (groups[-1][0] or term, [*groups[-1][1], point])
        else:
            groups.append((term, [point]))
    return groups


class _QueuePosition:
    def __init__(self) -> None:
        self.instance = InstanceId("")
        self.ahead: set[RequestId] = set()
        self.overtaken_by: list[RequestId] = []
        self.overtaken_seconds: EngineSeconds = 0.0
        self.overtaken_tokens: Tokens = 0
        self.unended: dict[RequestId, Answers] = {}
        """Requests ahead of it, at any decision, that have not ended yet."""

    def begin(self, instance: InstanceId, ahead: list[QueuedAhead]) -> None:
        self.instance = instance
        self.ahead = {other.request for other in ahead}
        self.unended |= {other.request: other.answers for other in ahead}
        self.overtaken_by, self.overtaken_seconds, self.overtaken_tokens = [], 0.0, 0

    def overtake(self, other: Request | None, request: RequestId) -> None:
        self.overtaken_by.append(request)
        if other is not None:
            self.unended[request] = other.answers
            self.overtaken_seconds += other.prefill_seconds
            self.overtaken_tokens += other.uncached_tokens


class _LeaderFold:
    """Folds the log in one leader's order and records the state before each decision."""

    def __init__(self, timeline: RequestTimeline, state: State, term: Term, position: _QueuePosition) -> None:
        self._timeline = timeline
        self._state = state
        self._blind = timeline.log_begins > state.sequence + 1
        self._order: LeaderOrder[LogEntry] = LeaderOrder(term, held_max=HELD_MAX)
        self._position = position
        if self._blind and term not in timeline.elected:
            state.term = term  # its election is among the entries that are gone

    def read(self, entries: Iterator[LogEntry], points: dict[Sequence, LogEntry]) -> None:
        """`points`: dated by the leader's clock."""
        for step in self._order.replay(entries, self._state):
            entry, event = step.entry, step.entry.event
            if entry.sequence in points and (step.counts or step.kind is Kind.REPEATED):
                point = points.pop(entry.sequence)
                if step.counts:
                    self._record(point)
            if step.counts and isinstance(event, RequestGranted) and self._overtakes(event):
                self._position.overtake(self._state.workload.requests.get(event.request), event.request)
            self._note_end(event)
            if not points:
                self._order.apply(step, self._state)
                return

    def read_on(self, entries: Iterator[LogEntry]) -> None:
        """Paces of other instances up to the first token, then the ends of those that were ahead."""
        timeline, state = self._timeline, self._state
        grant, first = timeline.grants[-1] if timeline.grants else None, timeline.first_token
        until = 0
        if grant is not None and first is not None and first.instance == grant.instance:
            until = next((entry.sequence for entry in timeline.entries if entry.event is first), 0)
        paces: list[float] = []
        for step in self._order.finish():
            if grant is not None and grant.sequence < step.entry.sequence < until:
                paces += self._pace_of(step.entry, grant.instance)
            self._note_end(step.entry.event)
            self._order.apply(step, state)
        for entry in entries:
            self._note_end(entry.event)
            if entry.sequence < until and grant is not None:
                paces += self._pace_of(entry, grant.instance)
                state.apply_entry(entry)
            elif not self._position.unended:
                break
        if paces:
            timeline.meanwhile = PeerPrefills(prefills=len(paces), pace=median(paces))

    def _note_end(self, event: LogEvent | None) -> None:
        unended = self._position.unended
        if unended and is_final_end(event) and event.request in unended:
            answers = unended.pop(event.request)
            if isinstance(event, RequestFinished) and (delivered := cached_of_keys(event, answers)) >= 0:
                self._timeline.delivered[event.request] = delivered

    def _pace_of(self, entry: LogEntry, other_than: InstanceId) -> list[float]:
        event = entry.event
        if not isinstance(event, PrefillFinished) or event.instance == other_than:
            return []
        found = prefilled(event, self._state)
        if found is None or not found[0].engine_seconds:
            return []
        request, at = found
        return [(at - request.granted_at) / request.engine_seconds]

    def _overtakes(self, event: RequestGranted) -> bool:
        came_later = event.request != self._timeline.request and event.request not in self._position.ahead
        return event.instance == self._position.instance and came_later

    def _record(self, entry: LogEntry) -> None:
        event, position = entry.event, self._position
        if isinstance(event, RequestGranted):
            self._timeline.grants.append(self._granted(entry, event))
            position.instance = InstanceId("")
        elif isinstance(event, Decision):
            decision = self._decided(entry, event)
            self._timeline.decisions.append(decision)
            position.begin(decision.instance, decision.ahead)

    def _decided(self, entry: LogEntry, event: Decision) -> DecisionRecord:
        timeline, state = self._timeline, self._state
        request = state.workload.requests.get(event.request)
        timeline.answers = request.answers if request is not None else timeline.answers
        after = event.at - timeline.arrived_at
        instance = InstanceId("") if isinstance(event, RequestRejected) else event.instance
        stamp = event.stamp
        upper = event.predicted_ttft_upper if isinstance(event, RequestPlaced) else 0.0
        candidates = self._weighed(request, event, instance)
        best = soonest(candidates)
        ahead_at = instance or (best.instance if best else InstanceId(""))
        ahead_seconds, ahead_tokens = self._work_ahead(ahead_at, request, event.at)
        at = state.fleet.get(ahead_at)
        return DecisionRecord(
            kind={RequestPlaced: "placed", RequestMigrated: "moved", RequestRejected: "rejected"}[type(event)],
            sequence=entry.sequence,
            term=stamp.term if stamp else Term(0),
            number=stamp.number if stamp else 0,
            as_of=stamp.as_of if stamp else 0,
            unseen_entries=self._order.unseen(entry.sequence),
            after_seconds=after,
            attempt=event.attempt if not isinstance(event, RequestMigrated) else request.attempt if request else 1,
            excluded=list(event.excluded) if not isinstance(event, RequestMigrated) else [],
            instance=instance,
            source=event.source if isinstance(event, RequestMigrated) else InstanceId(""),
            policy=event.policy,
            settings={} if isinstance(event, RequestMigrated) else state.settings_of(event),
            reason=event.reason,
            detail=event.detail if isinstance(event, RequestRejected) else "",
            retry_after=event.retry_after if isinstance(event, RequestRejected) else None,
            predicted_ttft=None if isinstance(event, RequestRejected) else after + event.predicted_ttft,
            predicted_ttft_upper=after + upper if upper else None,
            predicted_cached_tokens=_cached(request, event),
            budget_seconds=request.slo_ttft - after if request else 0.0,
            candidates=candidates,
            ahead_at=ahead_at,
            ahead=self._ahead(ahead_at, request, event.at),
            ahead_seconds=ahead_seconds,
            ahead_tokens=ahead_tokens,
            cost=at.cost if at else None,
            prefix=self._prefix(request),
            best_effort=event.best_effort
            if isinstance(event, RequestPlaced)
            else request is not None and request.best_effort,
        )

    def _weighed(self, request: Request | None, event: Decision, chosen: InstanceId) -> list[WeighedCandidate]:
        """`weighed` without being recorded: those that could serve it, where some were left out."""
        recorded = {} if isinstance(event, RequestMigrated) else {c.instance: c for c in event.candidates}
        held = self._state.index.hits(request.keys) if request else {}
        found = [self._weigh(c, held, chosen, weighed=True, recorded=True) for c in recorded.values()]
        if request is None:
            return found
        left_out: tuple[InstanceId, ...] = ()
        if not isinstance(event, RequestMigrated) and event.others:
            left_out = self._state.fleet.ready_for(request, event.excluded)
        view, able = PoolView(self._state, request, event.at), self._state.fleet.ready_for(request)
        return found + [
            self._weigh(
                view.candidate(i.id).recorded(),
                held,
                chosen,
                weighed=i.id in left_out,
                recorded=False,
                suited=i.id in able or i.status is not Status.READY,
            )
            for i in self._state.fleet.instances
            if i.id not in recorded
        ]

    def _weigh(
        self,
        candidate: Candidate,
        held: dict[InstanceId, int],
        chosen: InstanceId,
        *,
        weighed: bool,
        recorded: bool,
        suited: bool = True,
    ) -> WeighedCandidate:
        instance = self._state.fleet.get(candidate.instance)
        queue = self._state.workload.queues.get(candidate.instance, EMPTY_QUEUE)
        loaded_blocks = -(-candidate.loaded_tokens // self._state.settings.block_tokens)
        return WeighedCandidate(
            instance=candidate.instance,
            chosen=candidate.instance == chosen,
            weighed=weighed,
            recorded=recorded,
            status=(str(instance.status) if suited else UNSUITED) if instance else NOT_KNOWN if self._blind else "gone",
            knowledge=str(instance.knowledge) if instance else "",
            doubt=instance.doubt if instance else "",
            why_out=ejection_reason(self._state, instance) if instance else "",
            hit_blocks=candidate.hit_blocks,
            held_blocks=min(candidate.hit_blocks, held.get(candidate.instance, 0) + loaded_blocks),
            uncached_tokens=candidate.uncached_tokens,
            queue_seconds=candidate.queue_seconds,
            prefill_seconds=candidate.prefill_seconds,
            predicted_ttft=candidate.predicted_ttft,
            pending=len(queue.pending),
            in_prefill=len(queue.prefill),
            decoding=len(queue.decoding),
            correction=self._state.latency.correction(candidate.instance),
        )

    def _ahead(self, instance: InstanceId, request: Request | None, now: EngineSeconds) -> list[QueuedAhead]:
        queue = self._state.workload.queues.get(instance, EMPTY_QUEUE)
        priority = request.priority if request else LOWEST
        pending = [other for other in queue.pending.values() if RANK[other.queue_class] >= RANK[priority]]
        return [
            self._queued(other, request, now)
            for other in (*queue.prefill.values(), *pending)
            if other.id != self._timeline.request
        ]

    def _work_ahead(
        self, instance: InstanceId, request: Request | None, now: EngineSeconds
    ) -> tuple[EngineSeconds, Tokens]:
        queue = self._state.workload.queues.get(instance, EMPTY_QUEUE)
        return queue.work_ahead(now, request.priority if request else LOWEST)

    def _queued(self, other: Request, request: Request | None, now: EngineSeconds) -> QueuedAhead:
        place = self._prefix_place(request) if request and request.keys else None
        return QueuedAhead(
            request=other.id,
            tenant=other.tenant,
            stage="in prefill" if other.stage is Stage.PREFILL else str(other.stage),
            waited_seconds=now - other.arrived_at,
            inside_seconds=now - other.granted_at if other.stage is Stage.PREFILL else 0.0,
            answers=other.answers,
            uncached_tokens=other.uncached_tokens,
            prefill_seconds=other.prefill_seconds,
            prompt_tokens=other.prompt_tokens,
            same_prefix=request is not None
            and place is not None
            and len(other.keys) > place
            and other.keys[place] == request.keys[place],
        )

    def _prefix_place(self, request: Request) -> int:
        settings = self._state.settings
        level = max(1, settings.affinity_level_tokens // settings.block_tokens)
        return min(level, len(request.keys)) - 1

    def _prefix(self, request: Request | None) -> PrefixFacts | None:
        state = self._state
        if request is None or not request.keys:
            return None
        place = self._prefix_place(request)
        key = request.keys[place]
        held = state.index.hits(request.keys)
        return PrefixFacts(
            key=f"{key:016x}",
            tokens=(place + 1) * state.settings.block_tokens,
            arrivals=state.hotness.arrivals_of(key),
            window=state.hotness.arrivals,
            ready=len(state.fleet.ready),
            holders=sorted(instance for instance, blocks in held.items() if blocks > place),
        )

    def _granted(self, entry: LogEntry, event: RequestGranted) -> GrantRecord:
        state = self._state
        request = state.workload.requests.get(event.request)
        queue = state.workload.queues.get(event.instance, EMPTY_QUEUE)
        before_seconds, before_tokens = queue.engine_left(event.at)
        held = state.index.hits(request.keys).get(event.instance, 0) if request else 0
        instance = state.fleet.get(event.instance)
        return GrantRecord(
            sequence=entry.sequence,
            after_seconds=event.at - self._timeline.arrived_at,
            instance=event.instance,
            instance_known=instance is not None,
            attempt=event.attempt,
            by_leader=event.stamp is not None,
            overtaken_by=self._position.overtaken_by,
            overtaken_seconds=self._position.overtaken_seconds,
            overtaken_tokens=self._position.overtaken_tokens,
            in_engine=[
                self._queued(other, request, event.at) for other in queue.prefill.values() if other.id != event.request
            ],
            decoding=len(queue.decoding),
            work_seconds=before_seconds + (request.prefill_seconds if request else 0.0),
            work_tokens=before_tokens + (request.uncached_tokens if request else 0),
            own_seconds=request.prefill_seconds if request else 0.0,
            own_tokens=request.uncached_tokens if request else 0,
            correction=state.latency.correction(event.instance),
            corrections={i.id: state.latency.correction(i.id) for i in state.fleet.instances if i.role != "decode"},
            held_tokens=state.latency.cached_tokens(instance, held, request.prompt_tokens)
            if request and instance
            else 0,
        )


def _cached(request: Request | None, event: Decision) -> Tokens:
    if request is None or isinstance(event, RequestRejected):
        return 0
    return request.prompt_tokens - event.uncached_tokens
