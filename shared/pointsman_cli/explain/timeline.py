"""What happened to one request, and what was known at each decision about it.

The log is folded in the order of the leader that decided: what others wrote as the log has it, and the leader's own
decisions right behind their `as_of`, since it applied them at once. So the state before a decision is, bit for bit, what
was decided from. A decision may stand in the log at most AHEAD_MAX entries behind what it was made from. Numbers of candidates are those of the event; of instances that the policy did not weigh they are computed from that
state, with the leader's own arithmetic.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import median

from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    Candidate,
    LeaderElected,
    MigrationRefused,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.policies.pool_view import PoolView
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Seconds, Sequence, Tenant, Term, Tokens
from pointsman.simulation.replay.folding import apply_entry, copy_state, entries_after
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import InstanceQueue, Request, Stage

RecentDecisions = RequestPlaced | RequestRejected | RequestMigrated
AHEAD_MAX = 4096
NOT_KNOWN = "not known"
"""Status of an instance that joined before a log of which nothing earlier is known."""

_NO_LINE = InstanceQueue()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCandidate:
    """One instance as the decision found it. Seconds include the learned correction."""

    instance: InstanceId
    chosen: bool
    weighed: bool
    """Whether the policy looked at it; of others the numbers are computed anew."""
    status: str
    """Where it is NOT_KNOWN, so is everything here that the event itself does not say."""
    knowledge: str
    doubt: str
    why_out: str
    """Why it was ejected or half-open, and so no candidate; empty otherwise."""
    hit_blocks: int
    held_blocks: int
    """Of those, what its cache held; the rest was promised by prompts that had been placed there."""
    uncached_tokens: Tokens
    queue_seconds: Seconds
    prefill_seconds: Seconds
    predicted_ttft: Seconds
    pending: int
    in_prefill: int
    decoding: int
    correction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedAhead:
    """A request that was before this one on the same instance."""

    request: RequestId
    tenant: Tenant
    stage: str
    waited_seconds: Seconds
    """Since its arrival."""
    inside_seconds: Seconds
    """Since it was granted; 0 where it was not."""
    uncached_tokens: Tokens
    prefill_seconds: Seconds
    """By the cost model, uncorrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFacts:
    """How hot the prompt's beginning was."""

    key: str
    tokens: Tokens
    arrivals: int
    """Of the last `window` arrivals, how many began with it, this one included."""
    window: int
    ready: int
    holders: list[InstanceId]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision of the leader about this request. Times count from the arrival."""

    kind: str
    """placed, moved or rejected."""
    sequence: Sequence
    term: Term
    number: int
    as_of: Sequence
    unseen_entries: int
    """Entries that were in the log already, or came before the decision did, and that the leader had not applied."""
    after_seconds: Seconds
    attempt: int
    excluded: list[InstanceId]
    instance: InstanceId
    source: InstanceId
    policy: str
    settings: Settings
    reason: str
    detail: str
    retry_after: Seconds | None
    predicted_ttft: Seconds | None
    """From the arrival on; None where it was rejected."""
    predicted_cached_tokens: Tokens
    budget_seconds: Seconds
    """What was left of the objective."""
    candidates: list[WeighedCandidate]
    ahead: list[QueuedAhead]
    prefix: PrefixFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRefused:
    """A move that a rebalancer asked for and the leader, which knew more, did not make. Times count from the arrival."""

    sequence: Sequence
    after_seconds: Seconds
    source: InstanceId
    instance: InstanceId
    reason: str
    detail: str
    policy: str
    """Of the rebalancer."""
    plan: str
    planned_as_of: Sequence
    benefit_seconds: Seconds
    """How much sooner the rebalancer expected the first token."""
    rebind: bool
    """Whether it was to be taken out of its engine."""


@dataclass(slots=True, kw_only=True)
class GrantRecord:
    """It was sent to an engine. Seconds of work are by the cost model, uncorrected."""

    sequence: Sequence
    after_seconds: Seconds
    instance: InstanceId
    instance_known: bool
    """Otherwise nothing is known of its pace, of its cache and of who was there."""
    attempt: int
    by_leader: bool
    overtaken_by: list[RequestId]
    """Granted on the same instance while it waited, although they came later."""
    in_engine: list[QueuedAhead]
    decoding: int
    work_seconds: Seconds
    """Prefill work inside the engine before its first token, its own included."""
    work_tokens: Tokens
    correction: float
    corrections: dict[InstanceId, float]
    """Of all instances, at that moment."""
    held_tokens: Tokens
    """Of its prompt, what the cache held by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrefills:
    """Prefills of other instances that ended while the request was inside its engine. `pace`: at the median, how many
    times as long as their cost models say."""

    prefills: int
    pace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of its life. `kind`: way, queue, engine or decoding; gone where the log does not reach back so far."""

    kind: str
    name: str
    instance: InstanceId
    since_seconds: Seconds
    seconds: Seconds


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """Everything of one request. What the log does not say is None, empty or -1."""

    request: RequestId
    speed: float
    block_tokens: Tokens
    arrived_at: Seconds
    arrival: RequestArrived | None = None
    log_begins: Sequence = 0
    """The first entry there is."""
    entries: list[LogEntry] = field(default_factory=list)
    fenced: set[Sequence] = field(default_factory=set)
    """Entries that nobody applied: a deposed leader wrote them."""
    decisions: list[DecisionRecord] = field(default_factory=list)
    refused: list[MoveRefused] = field(default_factory=list)
    grants: list[GrantRecord] = field(default_factory=list)
    meanwhile: PeerPrefills | None = None
    failed: list[RequestAttemptFailed] = field(default_factory=list)
    """What engines did wrong, in the order of the log."""
    first_token: PrefillFinished | None = None
    end: RequestEnd | None = None
    phases: list[Phase] = field(default_factory=list)
    last_at: Seconds = 0.0
    """The newest time in the log, as far as it was read: until when a request without an end is known to have lived."""

    @property
    def ttft(self) -> Seconds | None:
        """From arrival to the first token; of an answer that is not streamed, to the whole of it."""
        if isinstance(self.end, RequestFinished):
            return self.end.ttft
        return self.first_token.ttft if self.first_token else None

    @property
    def arrived_before_the_log(self) -> bool:
        return self.arrival is None and self.log_begins > 1

    @property
    def placement(self) -> DecisionRecord | None:
        """The last decision on where it waits."""
        return next((d for d in reversed(self.decisions) if d.kind != "rejected"), None)


def story_of(
    entries: Iterable[LogEntry],
    request: RequestId,
    settings: PoolSettings,
    *,
    known: Callable[[Sequence], State | None] = lambda _: None,
) -> RequestTimeline:
    """Read the log twice: what it says of the request, then what was known. `entries` can be read again.

    `known`: for a log that has lost its beginning, what is known of it as of that entry or an earlier one.
    """
    story = _outline(entries, request, settings)
    decided = [
        e for e in story.entries if isinstance(e.event, RecentDecisions | RequestGranted) and not _is_fenced(e, story)
    ]
    begun = known(min(point.sequence for point in decided) - 1) if decided else None
    if begun is None:
        _Witness(story, State(settings), decided).read(entries)
    else:
        _Witness(story, copy_state(begun), decided).read(entries_after(begun.sequence, entries))
    story.refused = _refused(story)
    story.phases = _phases(story)
    return story


def _outline(entries: Iterable[LogEntry], request: RequestId, settings: PoolSettings) -> RequestTimeline:
    """Its own events; later ones of a kind that happens once are repeats."""
    story = RequestTimeline(request=request, speed=settings.speed, block_tokens=settings.block_tokens, arrived_at=0.0)
    term = 0
    for entry in entries:
        event = entry.event
        story.log_begins = story.log_begins or entry.sequence
        if event is None:
            continue
        story.last_at = max(story.last_at, event.at)
        if isinstance(event, LeaderElected):
            term = max(term, event.term)
        elif isinstance(event, RequestEvent) and event.request == request:
            story.entries.append(entry)
            if event.stamp is not None and event.stamp.term < term:
                story.fenced.add(entry.sequence)
            else:
                _note(story, event)
    story.arrived_at = _arrived_at(story)
    return story


def _note(story: RequestTimeline, event: LogEvent) -> None:
    match event:
        case RequestArrived():
            story.arrival = story.arrival or event
        case PrefillFinished():
            if event.stamp is None and story.first_token is None:
                story.first_token = event
        case RequestAttemptFailed():
            story.failed.append(event)
        case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
            story.end = story.end or event
        case _:
            pass


def _arrived_at(story: RequestTimeline) -> Seconds:
    if story.arrival is not None:
        return story.arrival.arrived_at
    if isinstance(story.end, RequestFinished):
        return story.end.at - story.end.e2e
    first = story.entries[0].event
    assert first is not None
    return first.at


def _refused(story: RequestTimeline) -> list[MoveRefused]:
    """In the order of the log; a second copy of one is a repeat."""
    refused: dict[Stamp | None, MoveRefused] = {}
    for entry in story.entries:
        event = entry.event
        if isinstance(event, MigrationRefused) and not _is_fenced(entry, story):
            told = MoveRefused(
                sequence=entry.sequence,
                after_seconds=event.at - story.arrived_at,
                source=event.source,
                instance=event.instance,
                reason=event.reason,
                detail=event.detail,
                policy=event.policy,
                plan=event.plan,
                planned_as_of=event.planned_as_of,
                benefit_seconds=event.benefit,
                rebind=event.rebind,
            )
            refused.setdefault(event.stamp, told)
    return list(refused.values())


def _term_of(entry: LogEntry) -> Term:
    """Of the leader that wrote it; 0 where no leader did."""
    stamp = entry.event.stamp if entry.event else None
    return stamp.term if stamp else Term(0)


def _is_fenced(entry: LogEntry, story: RequestTimeline) -> bool:
    return entry.sequence in story.fenced


class _Witness:
    """Folds the log as the leader did, and looks around before each decision on the request."""

    def __init__(self, story: RequestTimeline, state: State, points: list[LogEntry]) -> None:
        self._story = story
        self._state = state
        self._blind = story.log_begins > state.sequence + 1
        self._points = {point.sequence: point for point in points}
        """What is to be looked at yet."""
        self._term = self._next_term()
        self._unread: list[tuple[tuple[int, int, int], Sequence, LogEntry]] = []
        """Read, but not taken in: a heap, in the leader's order."""
        self._waits_at = InstanceId("")
        self._known_ahead: set[RequestId] = set()
        self._overtaken_by: list[RequestId] = []

    def read(self, entries: Iterable[LogEntry]) -> None:
        """Up to the last decision or grant, and on to the first token, to see how others fared."""
        if self._points:
            reading = iter(entries)
            self._read_decisions(reading)
            self._read_others(reading)

    def _read_decisions(self, entries: Iterator[LogEntry]) -> None:
        last = max(self._points)
        while self._points and (entry := next(entries, None)) is not None:
            heappush(self._unread, (self._place(entry), entry.sequence, entry))
            if entry.sequence >= last:
                self._take_next(1 + len(self._unread))
            elif entry.sequence in self._points and _term_of(entry):
                self._reach(entry)
            elif len(self._unread) > AHEAD_MAX:
                self._take_next()

    def _read_others(self, entries: Iterator[LogEntry]) -> None:
        """What is still unread was written before the last grant, or beside it: nothing that ended inside the engine."""
        story = self._story
        grant = story.grants[-1] if story.grants else None
        until = next((entry.sequence for entry in story.entries if entry.event is story.first_token), 0)
        if grant is None or story.first_token is None or story.first_token.instance != grant.instance:
            return
        for _, _, entry in sorted(self._unread):
            apply_entry(self._state, entry)
        paces: list[float] = []
        for entry in entries:
            if entry.sequence >= until:
                break
            paces += self._pace_of(entry, grant.instance)
            apply_entry(self._state, entry)
        if paces:
            story.meanwhile = PeerPrefills(prefills=len(paces), pace=median(paces))

    def _pace_of(self, entry: LogEntry, other_than: InstanceId) -> list[float]:
        """Of a prefill that this entry ends elsewhere; nothing of any other entry."""
        event = entry.event
        if not (isinstance(event, PrefillFinished) and event.stamp is None and event.instance != other_than):
            return []
        request = self._state.workload.requests.get(event.request)
        if request is None or request.stage is not Stage.PREFILL or not request.engine_seconds:
            return []
        return [(event.at - request.granted_at) / request.engine_seconds]

    def _reach(self, decision: LogEntry) -> None:
        """Take in what was known when this was decided, and the decision."""
        while decision.sequence in self._points:
            self._take_next()
        term = self._next_term()
        if term and term != self._term:  # what a follower takes in, it takes in as the log has it
            self._unread = [((sequence, 0, 0), sequence, entry) for _, sequence, entry in self._unread]
            heapify(self._unread)
            self._take_next(len(self._unread))
        self._term = term

    def _take_next(self, most: int = 1) -> None:
        """Take in so many entries, in the leader's order, unless all is seen before."""
        for _ in range(min(most, len(self._unread))):
            if not self._points:
                return
            entry = heappop(self._unread)[2]
            if self._points.pop(entry.sequence, None):
                self._look(entry)
            self._take(entry)

    def _next_term(self) -> Term:
        """Of the leader whose decision comes next; what an ingress decided alone has none."""
        return next((term for term in map(_term_of, self._points.values()) if term), Term(0))

    def _place(self, entry: LogEntry) -> tuple[int, int, int]:
        """Where the entry stands in the order of the leader whose decision is looked for: that of the log, but its own
        decisions right behind what it knew."""
        stamp = entry.event.stamp if entry.event else None
        if stamp is None or stamp.term != self._term:
            return entry.sequence, 0, 0
        return stamp.as_of, 1, stamp.number

    def _take(self, entry: LogEntry) -> None:
        event = entry.event
        if isinstance(event, RequestGranted) and self._overtakes(event):
            self._overtaken_by.append(event.request)
        apply_entry(self._state, entry)

    def _overtakes(self, event: RequestGranted) -> bool:
        """Whether it goes first where this one waits, and was not there before it."""
        came_later = event.request != self._story.request and event.request not in self._known_ahead
        return event.instance == self._waits_at and came_later

    def _look(self, entry: LogEntry) -> None:
        event = entry.event
        if isinstance(event, RequestGranted):
            self._story.grants.append(self._granted(entry, event))
            self._waits_at = InstanceId("")
        elif isinstance(event, RequestPlaced | RequestRejected | RequestMigrated):
            decision = self._decided(entry, event)
            self._story.decisions.append(decision)
            self._waits_at = decision.instance
            self._known_ahead = {ahead.request for ahead in decision.ahead}
            self._overtaken_by = []

    def _decided(self, entry: LogEntry, event: RecentDecisions) -> DecisionRecord:
        story, state = self._story, self._state
        request = state.workload.requests.get(event.request)
        after = event.at - story.arrived_at
        instance = InstanceId("") if isinstance(event, RequestRejected) else event.instance
        stamp = event.stamp
        return DecisionRecord(
            kind={RequestPlaced: "placed", RequestMigrated: "moved", RequestRejected: "rejected"}[type(event)],
            sequence=entry.sequence,
            term=stamp.term if stamp else Term(0),
            number=stamp.number if stamp else 0,
            as_of=stamp.as_of if stamp else 0,
            unseen_entries=sum(sequence < entry.sequence for _, sequence, _ in self._unread),
            after_seconds=after,
            attempt=event.attempt if not isinstance(event, RequestMigrated) else request.attempt if request else 1,
            excluded=list(event.excluded) if not isinstance(event, RequestMigrated) else [],
            instance=instance,
            source=event.source if isinstance(event, RequestMigrated) else InstanceId(""),
            policy=event.policy,
            settings={} if isinstance(event, RequestMigrated) else event.settings,
            reason=event.reason,
            detail=event.detail if isinstance(event, RequestRejected) else "",
            retry_after=event.retry_after if isinstance(event, RequestRejected) else None,
            predicted_ttft=None if isinstance(event, RequestRejected) else after + event.predicted_ttft,
            predicted_cached_tokens=_cached(request, event),
            budget_seconds=request.slo_ttft - after if request else 0.0,
            candidates=self._weighed(request, event, instance),
            ahead=self._ahead(instance, event.at),
            prefix=self._prefix(request),
        )

    def _weighed(self, request: Request | None, event: RecentDecisions, chosen: InstanceId) -> list[WeighedCandidate]:
        """Who was weighed first, in the order of the event, then everybody else in the fleet."""
        told = {} if isinstance(event, RequestMigrated) else {c.instance: c for c in event.candidates}
        others = [] if request is None else [i.id for i in self._state.fleet.instances if i.id not in told]
        held = self._state.index.hits(request.keys) if request else {}
        view = PoolView(self._state, request, event.at) if request else None
        found = [self._weigh(candidate, held, chosen, weighed=True) for candidate in told.values()]
        if view is not None:
            found += [self._weigh(view.candidate(i).recorded(), held, chosen, weighed=False) for i in others]
        return found

    def _weigh(
        self, told: Candidate, held: dict[InstanceId, int], chosen: InstanceId, *, weighed: bool
    ) -> WeighedCandidate:
        instance = self._state.fleet.get(told.instance)
        line = self._state.workload.queues.get(told.instance, _NO_LINE)
        return WeighedCandidate(
            instance=told.instance,
            chosen=told.instance == chosen,
            weighed=weighed,
            status=str(instance.status) if instance else NOT_KNOWN if self._blind else "gone",
            knowledge=str(instance.knowledge) if instance else "",
            doubt=instance.doubt if instance else "",
            why_out=self._state.ejection_reason(instance) if instance else "",
            hit_blocks=told.hit_blocks,
            held_blocks=min(told.hit_blocks, held.get(told.instance, 0)),
            uncached_tokens=told.uncached_tokens,
            queue_seconds=told.queue_seconds,
            prefill_seconds=told.prefill_seconds,
            predicted_ttft=told.predicted_ttft,
            pending=len(line.pending),
            in_prefill=len(line.prefill),
            decoding=len(line.decoding),
            correction=self._state.latency.correction(told.instance),
        )

    def _ahead(self, instance: InstanceId, now: Seconds) -> list[QueuedAhead]:
        """Who had no first token yet on the instance, the engine's own first."""
        line = self._state.workload.queues.get(instance, _NO_LINE)
        return [
            _told(request, now)
            for request in (*line.prefill.values(), *line.pending.values())
            if request.id != self._story.request
        ]

    def _prefix(self, request: Request | None) -> PrefixFacts | None:
        """The shortest prefix that is counted: what its arrivals share, many more may."""
        state = self._state
        if request is None or not request.keys:
            return None
        level = max(1, state.settings.affinity_level_tokens // state.settings.block_tokens)
        place = min(level, len(request.keys)) - 1
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
        line = state.workload.queues.get(event.instance, _NO_LINE)
        before_seconds, before_tokens = line.engine_left(event.at)
        held = state.index.hits(request.keys).get(event.instance, 0) if request else 0
        instance = state.fleet.get(event.instance)
        return GrantRecord(
            sequence=entry.sequence,
            after_seconds=event.at - self._story.arrived_at,
            instance=event.instance,
            instance_known=instance is not None,
            attempt=event.attempt,
            by_leader=event.stamp is not None,
            overtaken_by=self._overtaken_by,
            in_engine=[_told(other, event.at) for other in line.prefill.values() if other.id != event.request],
            decoding=len(line.decoding),
            work_seconds=before_seconds + (request.prefill_seconds if request else 0.0),
            work_tokens=before_tokens + (request.uncached_tokens if request else 0),
            correction=state.latency.correction(event.instance),
            corrections={i.id: state.latency.correction(i.id) for i in state.fleet.instances},
            held_tokens=state.latency.cached_tokens(instance, held, request.prompt_tokens)
            if request and instance
            else 0,
        )


def _cached(request: Request | None, event: RecentDecisions) -> Tokens:
    if request is None or isinstance(event, RequestRejected):
        return 0
    return request.prompt_tokens - event.uncached_tokens


def _told(request: Request, now: Seconds) -> QueuedAhead:
    return QueuedAhead(
        request=request.id,
        tenant=request.tenant,
        stage="in prefill" if request.stage is Stage.PREFILL else str(request.stage),
        waited_seconds=now - request.arrived_at,
        inside_seconds=now - request.granted_at if request.stage is Stage.PREFILL else 0.0,
        uncached_tokens=request.uncached_tokens,
        prefill_seconds=request.prefill_seconds,
    )


# --- Where the time went ---


def _phases(story: RequestTimeline) -> list[Phase]:
    """Its life as stretches of time that leave nothing out, from arrival to its end or to the end of the log."""
    first = (
        ("gone", "before its first entry that is left") if story.arrived_before_the_log else ("way", "to the scheduler")
    )
    marks: list[tuple[Seconds, str, str, InstanceId]] = [(story.arrived_at, *first, InstanceId(""))]
    for entry in story.entries:
        if entry.event is not None and not _is_fenced(entry, story):
            marks += _marks(entry.event, story)
    marks.sort(key=lambda mark: mark[0])  # what the ingress writes may stand in the log before what it answers
    over = story.end.at if story.end else max(story.last_at, marks[-1][0])
    marks = [mark for mark in marks if mark[0] <= over]  # after the end nothing counts
    phases: list[Phase] = []
    for (at, kind, name, instance), following in zip(marks, [*marks[1:], (over, "", "", "")], strict=True):
        seconds = max(0.0, min(following[0], over) - at)
        if kind and (seconds or kind != "way"):
            phases.append(
                Phase(kind=kind, name=name, instance=instance, since_seconds=at - story.arrived_at, seconds=seconds)
            )
    return _joined(phases)


def _marks(event: LogEvent, story: RequestTimeline) -> list[tuple[Seconds, str, str, InstanceId]]:
    """Which stretch begins with an event; of a grant also when the engine was reached, where the ingress told."""
    match event:
        case RequestArrived():
            return [(event.at, "queue", "in no queue yet", InstanceId(""))]
        case RequestPlaced() | RequestMigrated():
            return [(event.at, "queue", f"in the queue of {event.instance}", event.instance)]
        case RequestGranted():
            until = "the end of its prefill" if _is_handed_over(story, event.attempt) else "the first token"
            inside = (f"in {event.instance}, to {until}", event.instance)
            first = story.first_token
            if first is None or first.instance != event.instance:
                return [(event.at, "engine", *inside)]
            sent_at = min(first.at, max(event.at, first.at - first.prefill))
            return [(event.at, "way", f"on its way to {event.instance}", event.instance), (sent_at, "engine", *inside)]
        case RequestHandedOver():
            return [(event.at, "engine", f"fetched by {event.instance}, to the first token", event.instance)]
        case PrefillFinished():
            if event is story.first_token:
                return [(event.at, "decoding", f"decoding in {event.instance}", event.instance)]
            return []
        case _:
            return []


def _is_handed_over(story: RequestTimeline, attempt: int) -> bool:
    """Whether this attempt was prefilled in one instance and decoded in another."""
    events = (entry.event for entry in story.entries)
    return any(isinstance(event, RequestHandedOver) and event.attempt == attempt for event in events)


def _joined(phases: list[Phase]) -> list[Phase]:
    """Without stretches that took no time beside others that did."""
    return [phase for phase in phases if phase.seconds > 0] or phases


def blocks_of(arrival: RequestArrived) -> int:
    """Whole blocks of its prompt."""
    return len(arrival.keys) // KEY_BYTES
