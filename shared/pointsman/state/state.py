"""The fold: `State.apply(event)` is the only code that turns the log into state.

Synchronous, deterministic, no I/O. Time is the time that events carry; what a policy remembers (hotness, last
placements, learned corrections) is kept here and changes only here. The leader applies its own decisions at once
and skips them when they come back through the log; everyone else applies the log in order. What a leader of an earlier
term has written after the newest LeaderElected is passed over by everyone, and so is a decision that comes twice.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, assert_never

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    MigrationRefused,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import is_fenced
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.subjects import is_leader_subject
from pointsman.primitives import BlockKey, Epoch, InstanceId, Seconds, Sequence, Term, Tokens
from pointsman.state.dead_letters import DeadLetter, DeadLetters
from pointsman.state.deliveries import Contradictions, DeliveredHits
from pointsman.state.engine_profiles import prefill_seconds
from pointsman.state.fleet import Fleet, Instance
from pointsman.state.hotness import Hotness
from pointsman.state.latency_model import Correction
from pointsman.state.outages import Outages
from pointsman.state.outliers import Failure, Outliers, Prefill
from pointsman.state.prefix_index import PrefixIndex
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.scaling import Scaling
from pointsman.state.session_affinity import SessionAffinity
from pointsman.state.speculation import Speculation
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decode_load import DecodeLoad
from pointsman.state.workload import NO_EPOCH, NO_INSTANCE, Rejection, Request, Stage, Workload

CONFIRMATION_WALL_SECONDS = 2.0
"""How long after the first token a promise waits for the engine's events to confirm it."""
TRIAL_OPEN_WALL_SECONDS = 10.0
"""How long a failed trial of a half-open instance waits for whose fault it was, before another request may try it."""
UNREGISTERED_MAX = 1000
"""Who reports without having joined: beyond so many the one that was silent longest is forgotten."""
DELIVERED_WALL_SECONDS = 45.0
"""How long a prefix that an engine has delivered from its cache counts as held where its events do not say so."""

FOLD_VERSION = 3
"""The rules by which events are folded today. A log says by which its leaders folded it, so that replaying it gives the
same decisions: 1 (logs that say nothing) believes what events say of caches and fleet; 2 checks that against what engines
deliver; 3 gives a request the time back that it was held or lost at an engine that failed it."""

STEP_MAX = 2**32
"""How far ahead of what is known a term, an epoch or the number of a decision may be: whoever comes next counts on from it,
and one entry must not use up the numbers that there are."""
EPOCH_EXPECTED_MAX = Epoch(10**13)
"""Unix ms in the year 2286: a first epoch may be so high in any case."""

M = TypeVar("M", bound=Tracker)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What State must know of its pool. The same for everyone who folds the same log."""

    block_tokens: Tokens = 64
    speed: float = 1.0
    affinity_level_tokens: Tokens = 512
    hot_share: float = 1.0
    cold_share: float = 0.5
    fold_version: int = FOLD_VERSION


class State:
    """Everything known of one pool, as of the last event applied."""

    def __init__(self, settings: PoolSettings, trackers: Iterable[Tracker] = ()) -> None:
        """`trackers`: what the chosen policies remember beyond what is kept anyway."""
        self.settings = settings
        self._trackers = tuple(trackers)
        self.fleet = Fleet(checks_model=settings.fold_version >= 2)
        self.index = PrefixIndex()
        self.speculation = Speculation()
        self.delivered = DeliveredHits()
        self.contradictions = Contradictions()
        self.workload = Workload()
        self.session_affinity = SessionAffinity()
        self.hotness = Hotness(
            block_tokens=settings.block_tokens,
            level_tokens=settings.affinity_level_tokens,
            hot_share=settings.hot_share,
            cold_share=settings.cold_share,
        )
        self.scaling = Scaling()
        self.outages = Outages(settings.speed)
        self.outliers = Outliers(settings.speed)
        self.decode_load = DecodeLoad()
        """How fast instances decode; kept only where prefill and decode are split."""
        self.corrections: dict[InstanceId, Correction] = {}
        self.placements = 0
        self.term = Term(0)
        self.elected: Sequence = 0
        """Where the newest entry on the subject of LeaderElected is in the log."""
        self.sequence: Sequence = 0
        self.fenced = 0
        """Decisions of deposed leaders that were passed over."""
        self.recent_decisions = RecentDecisions()
        self.writes_lost = 0
        self.dead_letters = DeadLetters()
        self.last_at: Seconds = 0.0
        """The latest time that any event so far carried: how fresh this knowledge is."""
        self.unregistered: dict[InstanceId, Seconds] = {}
        """Who reports without having joined, as far as this log tells, and when last: to be asked to join again."""
        self._epochs: dict[InstanceId, Epoch] = {}
        self._promises: deque[tuple[Seconds, InstanceId, Epoch, list[BlockKey]]] = deque()

    def apply(self, event: LogEvent, sequence: Sequence = 0) -> None:
        """Take in one event. `sequence` is its place in the log, or 0 for a decision applied before it is logged.

        Never raises: what the fold fails on has the effect that it had until then, the same for everyone who folds this
        log, and becomes a dead letter.
        """
        if sequence:
            self.sequence = sequence
        try:
            self._take_in(event, sequence)
        except Exception as error:  # noqa: BLE001 - an entry cannot be taken back: nobody could ever fold beyond it
            reason = short_reason(f"{type(error).__name__}: {error}")
            self.dead_letters.add(DeadLetter(sequence, type(event).__name__, reason, decoded=True))

    def _take_in(self, event: LogEvent, sequence: Sequence) -> None:
        if event.stamp is not None:
            if is_fenced(event.stamp, self.term):
                self.fenced += 1
                return
            if not self.recent_decisions.first_time(event.stamp):
                return
        self.last_at = max(self.last_at, event.at)
        self._settle_promises(event.at)
        if event.stamp is None and isinstance(event, PrefillFinished | RequestFinished):
            self.fleet.note_activity(event.instance, event.at)
            self.outliers.answered(event.request, event.instance)
        self.delivered.settle(event.at)
        match event:
            case BlocksStored():
                if self._next_cache_event(event):
                    for run in event.runs:
                        self.index.store(event.instance, run.parent, unpack_keys(run.keys))
            case BlocksRemoved():
                if self._next_cache_event(event):
                    removed = unpack_keys(event.keys)
                    self.index.remove(event.instance, removed)
                    if not event.expired:
                        self._forget_computed(event.instance, set(removed))
                        self.delivered.remove(event.instance, removed)
                    if self._learns_from_deliveries:
                        self.contradictions.removed(event.instance, removed, self.sequence)
            case CacheCleared():
                if self._next_cache_event(event):
                    self.index.clear(event.instance)
                    self._forget_computed(event.instance)
                    self.delivered.drop(event.instance)
                    self.contradictions.begin(event.instance, self.sequence)
                    instance = self.fleet[event.instance]
                    instance.cache, instance.cache_detail = "empty", ""
            case CacheGap():
                if self._next_cache_event(event):
                    instance_missing = self.fleet[event.instance]
                    instance_missing.doubt = f"engine events missed: {event.reason}"
                    instance_missing.cache_detail = event.reason
            case CacheSnapshot():
                self._replace_holdings(event)
            case InstanceJoined():
                self._join(event)
            case InstanceReported():
                self._report(event)
            case InstanceProbed():
                instance_probed = self._current(event.instance, event.epoch)
                if instance_probed:
                    instance_probed.parity = event.parity
            case InstanceSuspected():
                if self._current(event.instance, event.epoch):
                    self.fleet.suspect(event.instance)
            case InstanceDraining():
                if self._is_there_since(event):
                    self.fleet.drain(event.instance, draining=True, leaving=event.leaving)
            case InstanceUndrained():
                if self._is_there_since(event):
                    self.fleet.drain(event.instance, draining=False)
            case InstanceEjected():
                if self._current(event.instance, event.epoch):
                    self._eject(event)
            case InstanceUnejected():
                if self._current(event.instance, event.epoch):
                    self._uneject(event)
            case InstanceLeft():
                if self._current(event.instance, event.epoch):
                    self._forget_cache(event.instance)
                    self.fleet.leave(event.instance)
                    self.outliers.left(event.instance)
                    self.decode_load.left(event.instance, event.at)
                    for tracker in self._trackers:
                        tracker.left(event.instance, event.at)
                elif event.stamp is not None and self._is_there_since(event):
                    self.fleet.note_restart(event.instance, event.stamp.as_of + 1)
                self.unregistered.pop(event.instance, None)
            case RequestArrived():
                self._arrive(event)
            case RequestPlaced():
                self._place(event)
            case RequestGranted():
                self._grant(event)
            case RequestMigrated():
                self._migrate(event)
            case RequestHandedOver():
                self._hand_over(event, event.instance)
            case HandOverRefused():
                self._hand_over(event, event.source)
            case PrefillFinished():
                self._finish_prefill(event)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                self._end(event)
            case LeaderElected():
                if sequence:  # a term begins for everyone at the same entry, also for the one who leads it
                    self.elected = sequence
                    _check_step("term", self.term, event.term)
                    self.term = max(self.term, event.term)
            case WritesLost():
                self.writes_lost += event.count
            case ScaleDecided():
                _check_step("number", self.scaling.number, event.number)
                self.scaling.decide(event)
            case ScaleApplied():
                self.scaling.apply(event)
            case RequestAttemptFailed():
                self._fail_attempt(event)
            case MigrationRefused():
                pass
            case _:
                assert_never(event)
        if isinstance(event, CacheEvent | FleetEvent):
            self.fleet.note_knowledge(event.instance, event.at)

    def skip(self, sequence: Sequence, *, subject: str = "", problem: str = "") -> None:
        """Pass over a log entry whose effect is here already, or which nobody can read: then `problem` says why."""
        self.sequence = sequence
        if problem:
            self.dead_letters.add(DeadLetter(sequence, short_reason(subject), short_reason(problem), decoded=False))
        if is_leader_subject(subject):
            self.elected = sequence  # the next election must come behind this one, whatever it says

    def tracker(self, kind: type[M]) -> M:
        """The tracker of this kind. Asserts that a chosen policy asked for it."""
        found = next((tracker for tracker in self._trackers if isinstance(tracker, kind)), None)
        assert found is not None, f"no chosen policy keeps {kind.__name__}"
        return found

    def newest_epoch(self, instance: InstanceId) -> Epoch:
        """The highest that this instance ever joined under; what joins under a lower one is not believed."""
        return self._epochs.get(instance, NO_EPOCH)

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        """Leading blocks of a prompt that each instance holds, by its events or by what it delivered, or is about to hold."""
        hits = self.index.hits(keys)
        self.speculation.extend_hits(keys, hits)
        self.delivered.extend_hits(keys, hits)
        return hits

    def cached_tokens(self, instance: Instance, hit_blocks: int, prompt_tokens: Tokens) -> Tokens:
        """Prompt tokens that a hit saves: whole engine blocks, and never the last token, which is always computed."""
        if not hit_blocks:
            return 0
        usable = (prompt_tokens - 1) // instance.engine_block_tokens * instance.engine_block_tokens
        return max(0, min(hit_blocks * self.settings.block_tokens, usable))

    def prefill_seconds(self, instance: Instance, prompt_tokens: Tokens, cached_tokens: Tokens) -> Seconds:
        """Prefill work by the instance's cost model, uncorrected."""
        return prefill_seconds(instance.cost, prompt_tokens, cached_tokens)

    def expected_seconds(self, instance: InstanceId, work: Seconds, tokens: Tokens) -> Seconds:
        """What prefill `work` by the cost model, for so many uncached tokens, will really take there."""
        correction = self.corrections.get(instance)
        return correction.seconds(work, tokens) if correction else work

    def correction(self, instance: InstanceId) -> float:
        correction = self.corrections.get(instance)
        return correction.factor if correction else 1.0

    def prediction_error(self, instance: InstanceId) -> float | None:
        """Median absolute error of the newest prefill predictions there, as a share; None before there was one."""
        correction = self.corrections.get(instance)
        return correction.error if correction else None

    def ejection_reason(self, instance: Instance) -> str:
        """Why it is ejected, or takes one request at a time; empty where it is whole."""
        record = self.outliers.record(instance.id)
        if instance.ejected:
            return f"ejected for {record.until - record.ejected_at:g} s, {record.why}"
        return f"half-open, takes one request at a time: {record.why}" if instance.half_open else ""

    # Cache events

    def _next_cache_event(self, event: BlocksStored | BlocksRemoved | CacheCleared | CacheGap) -> bool:
        """Whether the event applies: a repeat does not, a gap does but leaves a doubt."""
        instance = self._current(event.instance, event.epoch)
        if instance is None or event.sequence <= instance.sequence:
            return False
        _check_step("sequence", instance.sequence, event.sequence)
        if event.sequence > instance.sequence + 1:
            instance.doubt = f"cache events {instance.sequence + 1} to {event.sequence - 1} are missing"
        instance.sequence = event.sequence
        return True

    def _replace_holdings(self, event: CacheSnapshot) -> None:
        instance = self._current(event.instance, event.epoch)
        if instance is None or event.sequence < instance.sequence:
            return
        _check_step("sequence", instance.sequence, event.sequence)
        self.index.clear(event.instance)
        for run in event.runs:
            self.index.store(event.instance, run.parent, unpack_keys(run.keys))
        self.contradictions.begin(event.instance, self.sequence)
        instance.sequence = event.sequence
        instance.doubt = instance.contradicted = ""

    def _current(self, instance: InstanceId, epoch: Epoch) -> Instance | None:
        """The instance, if this is its present epoch; what an older life of it says is ignored."""
        known = self.fleet.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def _is_there_since(self, event: InstanceDraining | InstanceUndrained | InstanceLeft) -> bool:
        """Whether the instance is there without a break since this was decided. It may have begun a new life before the
        decision came to stand in the log: the leader decided first, and the new life takes over from the old."""
        known = self.fleet.get(event.instance)
        if known is None or event.epoch >= known.epoch:
            return known is not None and event.epoch == known.epoch
        return event.stamp is not None and event.stamp.as_of >= known.arrived_at

    # The fleet

    def _join(self, event: InstanceJoined) -> None:
        newest = self.newest_epoch(event.instance)
        if event.epoch <= newest:
            return
        _check_step("epoch", max(newest, EPOCH_EXPECTED_MAX), event.epoch)
        self._epochs[event.instance] = event.epoch
        self.unregistered.pop(event.instance, None)
        self._forget_cache(event.instance)
        self.contradictions.begin(event.instance, self.sequence)
        known = self.fleet.get(event.instance)
        self.fleet.join(event).arrived_at = known.arrived_at if known is not None else self.sequence
        if event.instance in self.workload.queues:
            self.workload.queues[event.instance].aborted_at = 0.0
        self.index.add(event.instance)
        self.outliers.joined(event.instance, event.at)
        self.decode_load.joined(event.instance, event.at)
        for tracker in self._trackers:
            tracker.joined(event.instance, event.at)

    def _report(self, event: InstanceReported) -> None:
        instance = self._current(event.instance, event.epoch)
        if instance is None:
            if event.instance not in self.fleet or event.epoch >= self._epochs[event.instance]:
                self.unregistered.pop(event.instance, None)
                self.unregistered[event.instance] = event.at
                if len(self.unregistered) > UNREGISTERED_MAX:
                    del self.unregistered[next(iter(self.unregistered))]
            return
        heard_at = instance.heard_at
        self.fleet.hear(event)
        if instance.cache == "no_events":
            return
        if event.sequence < instance.sequence:
            if event.at > heard_at and self.settings.fold_version >= 2:  # no old report once more
                instance.forged = True
                instance.doubt = (
                    f"the log has cache events up to {instance.sequence}, its worker wrote {event.sequence}"
                )
            return
        if event.sequence > instance.sequence:
            instance.doubt = f"cache events up to {event.sequence} are missing"
            return
        blocks, digest = self.index.blocks(event.instance), self.index.digest(event.instance)
        same = event.blocks == blocks and event.digest == digest
        instance.doubt = "" if same else f"the engine holds {event.blocks} blocks, the index {blocks}, or others"
        if same:
            self._settle_contradictions(instance, event.at)

    def _settle_contradictions(self, instance: Instance, at: Seconds) -> None:
        found = self.contradictions.settle(
            instance.id,
            at / self.settings.speed,
            lambda key: self.index.holds(instance.id, key),
        )
        if found and instance.relied_on:
            instance.contradicted = found

    def _eject(self, event: InstanceEjected) -> None:
        why = f"{event.cause}: {event.detail}"
        self.fleet.eject(event.instance)
        self.outliers.ejected(event.instance, event.at, seconds=event.seconds, number=event.number, why=why)

    def _uneject(self, event: InstanceUnejected) -> None:
        self.fleet.uneject(event.instance, half_open=event.half_open)
        self.outliers.unejected(event.instance, event.at, half_open=event.half_open)
        if not event.half_open:
            self.corrections.pop(event.instance, None)  # what a sick engine has taught says nothing of a well one

    def has_trial_request(self, instance: InstanceId) -> bool:
        """Whether a half-open instance has a request already that was granted since, or has failed one and nobody knows yet
        whose fault that was."""
        since = self.outliers.record(instance).half_open_since
        line = self.workload.queues.get(instance)
        if line is not None and any(r.granted_at >= since for r in (*line.prefill.values(), *line.decoding.values())):
            return True
        return self.outliers.is_open(
            instance, since=max(since, self.last_at - TRIAL_OPEN_WALL_SECONDS * self.settings.speed)
        )

    def _forget_cache(self, instance: InstanceId) -> None:
        self.index.drop(instance)
        self.speculation.drop(instance)
        self.delivered.drop(instance)
        self.contradictions.drop(instance)
        self.corrections.pop(instance, None)

    # Requests

    def _arrive(self, event: RequestArrived) -> None:
        if event.request in self.workload.requests or self.workload.end_of(event.request):
            return
        keys = unpack_keys(event.keys)
        request = self.workload.requests[event.request] = Request(
            id=event.request,
            tenant=event.tenant,
            session=event.session,
            keys=keys,
            prompt_tokens=event.prompt_tokens,
            max_output_tokens=event.max_output_tokens,
            slo_ttft=event.slo_ttft + self.outages.allowance(event.held_up, event.at),
            slo_tpot=event.slo_tpot,
            arrived_at=event.arrived_at,
            exact=event.exact,
            streaming=event.streaming,
            adapter=event.adapter,
            followed=event.followed,
            alias=event.alias,
            context_tokens=event.context_tokens,
        )
        self.hotness.arrived(keys, len(self.fleet.ready))
        for tracker in self._trackers:
            tracker.arrived(request, event.at)

    def _place(self, event: RequestPlaced) -> None:
        request = self.workload.requests.get(event.request)
        if request is None or (request.stage is not Stage.ARRIVED and event.attempt <= request.attempt):
            return  # said before: it may have been granted since, and must not wait again
        self._unplace(request, event.at)
        request.attempt = event.attempt
        request.excluded = tuple(event.excluded)
        request.slo_ttft += event.lost_seconds
        self._queue(request, event)
        self.placements += 1

    def _migrate(self, event: RequestMigrated) -> None:
        request = self.workload.requests.get(event.request)
        moves_from = Stage.PREFILL if event.rebound else Stage.PENDING
        if request is None or request.stage is not moves_from or request.instance != event.source:
            return
        if event.rebound:
            self.workload.queue(event.source).note_abort(event.at)
        self._unplace(request, event.at)
        self._queue(request, event)
        if event.rebound:
            request.rebound_from = event.source

    def _queue(self, request: Request, event: RequestPlaced | RequestMigrated) -> None:
        request.stage = Stage.PENDING
        request.instance = event.instance
        request.hit_blocks = event.hit_blocks
        request.uncached_tokens = event.uncached_tokens
        request.prefill_seconds = event.prefill_seconds
        request.predicted_ttft = event.predicted_ttft
        request.placed_at = event.at
        request.prefilled_by = NO_INSTANCE
        if self._learns_from_deliveries:
            request.held_blocks = self.index.depth(event.instance, request.keys)
            request.placed_as_of = event.stamp.as_of if event.stamp is not None else self.sequence
        self._join_line(request, event.at)
        if event.decode:
            self.workload.expect(request, event.decode)

    def _join_line(self, request: Request, at: Seconds) -> None:
        instance = request.instance
        self.workload.queue(instance).enqueue(request)
        request.epoch = self._epochs.get(instance, NO_EPOCH)
        self.speculation.promise(instance, request.keys)
        self.session_affinity.placed(request.tenant, request.session, request.keys, instance)
        for tracker in self._trackers:
            tracker.placed(request, at)

    def _unplace(self, request: Request, at: Seconds) -> None:
        if request.stage is not Stage.ARRIVED:
            for tracker in self._trackers:
                tracker.unplaced(request, at)
            self.decode_load.unplaced(request, at)
            self.workload.queue(request.instance).remove(request)
            if request.decode:
                self.workload.expect(request, NO_INSTANCE)
            if request.stage is not Stage.DECODING:
                self._take_back(request)
            request.stage = Stage.ARRIVED

    def _grant(self, event: RequestGranted) -> None:
        request = self.workload.requests.get(event.request)
        if request is None:
            return
        if event.stamp is None and not self._is_there(request, event.instance):
            self._correct_location(request, event)
        if request.stage is not Stage.PENDING or request.instance != event.instance:
            return
        request.rebind = event.rebind
        self._enter_engine(request, event.at)

    def _enter_engine(self, request: Request, at: Seconds) -> None:
        request.stage = Stage.PREFILL
        request.granted_at = at
        self.workload.queue(request.instance).grant(request, at)
        for tracker in self._trackers:
            tracker.granted(request, at)

    def _is_there(self, request: Request, instance: InstanceId) -> bool:
        return request.instance == instance and request.stage in (Stage.PENDING, Stage.PREFILL)

    def _correct_location(self, request: Request, event: RequestGranted) -> None:
        """An ingress says that a request is where we do not think it: it is in nobody's queue now."""
        instance = self.fleet.get(event.instance)
        if instance is None or request.stage is Stage.DECODING:
            return
        request.attempt = event.attempt
        self._requeue_at(request, instance, event.at)
        if event.decode:
            self.workload.expect(request, event.decode)

    def _requeue_at(self, request: Request, instance: Instance, at: Seconds) -> None:
        """Into the line of this instance, of whose cache nothing is assumed: an ingress has told where the request is."""
        self._unplace(request, at)
        request.stage = Stage.PENDING
        request.instance = instance.id
        request.hit_blocks = 0
        request.held_blocks, request.placed_as_of = 0, self.sequence
        request.uncached_tokens = request.prompt_tokens
        request.prefill_seconds = self.prefill_seconds(instance, request.prompt_tokens, 0)
        request.prefilled_by = NO_INSTANCE
        if request.rebound_from == instance.id:
            request.rebound_from = NO_INSTANCE  # its ingress had not heard of that, and has kept it
        self._join_line(request, at)

    def _finish_prefill(self, event: PrefillFinished) -> None:
        request = self.workload.requests.get(event.request)
        if request is None:
            return
        learnable = event.stamp is None and not request.rebound_from  # else nobody knows when it really was sent
        if request.rebound_from == event.instance and event.stamp is None:
            self._keep_at_source(request, event)
        if request.instance != event.instance:
            return
        if request.stage is Stage.PREFILL:
            line = self.workload.queue(event.instance)
            line.finish_prefill(request, event.at)
            line.aborted_at = line.aborted_at if event.stamp else 0.0
            if request.decode:
                self.workload.expect(request, NO_INSTANCE)
            if learnable:
                self._learn_prefill(request, event.at, event.prefill)
        elif request.stage is not Stage.HANDED_OVER:
            return
        request.stage = Stage.DECODING
        self._promise_until_confirmed(request, event.at)
        if self.fleet.split:
            self.decode_load.first_token(request, event.at)
        for tracker in self._trackers:
            tracker.first_token(request, event.at)

    def _keep_at_source(self, request: Request, event: PrefillFinished) -> None:
        """A request was re-bound, and its first token came from where it had been: its ingress had not heard yet."""
        instance = self.fleet.get(event.instance)
        if instance is not None and request.stage in (Stage.PENDING, Stage.PREFILL):
            self._requeue_at(request, instance, event.at)
            self._enter_engine(request, event.at)

    def _fail_attempt(self, event: RequestAttemptFailed) -> None:
        instance = self.fleet.get(event.instance)
        request = self.workload.requests.get(event.request)
        if instance is None:
            return
        since = event.at
        if request is not None and event.instance in (request.instance, request.prefilled_by):
            if event.instance == request.instance and request.epoch != instance.epoch:
                return  # an earlier life of it
            since = request.granted_at or event.at
        given_up = self.outliers.given_up(event.request, event.instance)
        failure = Failure(event.instance, event.at, since if given_up is None else given_up, event.what)
        proven = event.failure == "connect_failure" or given_up is not None
        self.outliers.failed(event.request, failure, proven=proven)

    def _learn_prefill(self, request: Request, at: Seconds, took: Seconds) -> None:
        """`took`: by its ingress's own clock, which is set apart from the leader's."""
        prefill = Prefill(at, took, request.engine_seconds)
        self.outliers.prefilled(request.instance, prefill, since=request.granted_at)
        correction = self.corrections.setdefault(request.instance, Correction())
        correction.learn(
            predicted=request.engine_seconds, observed=at - request.granted_at, tokens=request.engine_tokens
        )

    def _hand_over(self, event: RequestHandedOver | HandOverRefused, to: InstanceId) -> None:
        """Its prefill is over. `to`: who decodes it, or, where nobody does, who has prefilled it: there it stays until its
        ingress ends it or asks once more."""
        request = self.workload.requests.get(event.request)
        if request is None or event.attempt < request.attempt:
            return
        is_news = request.stage is Stage.PREFILL and request.instance == event.source
        if is_news:
            self._transfer_out(request, event)
        elif request.awaits_decoder and request.instance == event.source != to:
            self.workload.queue(event.source).remove(request)
            self._take_back(request)
        elif event.stamp is None and not self._is_handed_over(request, to):
            self._unplace(request, event.at)  # an ingress says so, and we thought it elsewhere
        else:
            return
        self._transfer_in(request, event, to)
        if is_news and event.prefill > 0:
            for tracker in self._trackers:
                tracker.handed_over(request, event.at)

    def _transfer_out(self, request: Request, event: RequestHandedOver | HandOverRefused) -> None:
        """The instance that prefilled it has nothing to do with it any more."""
        self.workload.queue(event.source).transfer_out(request, event.at)
        if event.prefill > 0:
            self._learn_prefill(request, event.at, event.prefill)
        self._promise_until_confirmed(request, event.at)

    def _is_handed_over(self, request: Request, instance: InstanceId) -> bool:
        return request.stage is Stage.DECODING or (request.stage is Stage.HANDED_OVER and request.instance == instance)

    def _transfer_in(self, request: Request, event: RequestHandedOver | HandOverRefused, to: InstanceId) -> None:
        """It is with this instance from here on."""
        request.stage = Stage.HANDED_OVER
        request.attempt = event.attempt
        request.instance, request.prefilled_by = to, event.source
        request.epoch = self._epochs.get(to, NO_EPOCH)
        self.workload.expect(request, NO_INSTANCE)
        self.workload.queue(to).decoding[request.id] = request
        self.speculation.promise(to, request.keys)

    def _end(self, event: RequestEnd) -> None:
        if isinstance(event, RequestCancelled) and event.stamp is not None and event.instance:
            granted = self.workload.requests.get(event.request)
            if granted is not None and granted.instance == event.instance:
                idle = event.cause is CancelCause.ENGINE_IDLE
                self.outliers.gave_up(event.request, event.instance, since=granted.granted_at, idle=idle)
        if not isinstance(event, RequestFinished):
            self.outliers.ended(event.request, given_up=isinstance(event, RequestCancelled))
        request = self.workload.end(event.request, type(event).__name__)
        if request is None:
            return
        if isinstance(event, RequestFinished) and event.instance == request.instance:
            self.outliers.served(event.instance, event.at, since=request.granted_at)
        if isinstance(event, RequestRejected):
            self.workload.reject(
                event.request,
                Rejection(request.arrived_at, event.attempt, event.reason, event.detail, event.retry_after),
            )
        finished = event if isinstance(event, RequestFinished) else None
        if finished is not None and self._learns_from_deliveries:
            self._learn_delivered(request, finished)
        kept = finished is not None and finished.instance == request.rebound_from
        if request.stage in (Stage.PREFILL, Stage.HANDED_OVER) and finished and not kept:
            self._promise_until_confirmed(request, event.at)
        elif request.stage in (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER):
            self._take_back(request)
        if self.fleet.split:
            self.decode_load.ended(request, event.at, finished)
        for tracker in self._trackers:
            if isinstance(event, RequestRejected):
                tracker.refused(request, event.at, event.reason)
            tracker.ended(request, event.at, finished)

    @property
    def _learns_from_deliveries(self) -> bool:
        return self.settings.fold_version >= 2

    def _learn_delivered(self, request: Request, event: RequestFinished) -> None:
        """What the engine had of this prompt, against what its events say. Only where both speak of the same: one prompt,
        whose keys are the engine's, computed whole by the instance where it was placed, in one life of it."""
        instance = self.fleet.get(request.instance)
        alike = (
            event.instance == request.instance
            and request.exact
            and not request.rebound_from
            and not request.prefilled_by
            and event.prompt_tokens == request.prompt_tokens
            and event.predicted_cached_tokens >= 0
            and event.cached_tokens >= 0
        )
        if instance is None or instance.epoch != request.epoch or not alike:
            return
        keys, name, tokens = request.keys, instance.id, event.cached_tokens
        delivered = min(tokens // self.settings.block_tokens, len(keys))
        if not instance.relied_on or instance.doubt or instance.parity is False:
            self._learn_hit(instance, keys[:delivered], event.at)
            return
        held = self.index.depth(name, keys)
        told = self.cached_tokens(instance, min(held, request.held_blocks), request.prompt_tokens)
        if told - tokens > self.settings.block_tokens:
            reason = f"the engine had {tokens} tokens of a prompt cached, its events tell of {told}"
            self.contradictions.suspect(name, keys[delivered], request.placed_as_of, reason, held=True)
        elif held < delivered and not self.contradictions.explained(name, keys[held], request.placed_as_of):
            self._learn_hit(instance, keys[:delivered], event.at)
            told = self.cached_tokens(instance, held, request.prompt_tokens)
            if tokens - told > self.settings.block_tokens:
                reason = f"the engine had {tokens} tokens of a prompt cached, its events tell of {told}"
                self.contradictions.suspect(name, keys[held], request.placed_as_of, reason, held=False)

    def _learn_hit(self, instance: Instance, keys: list[BlockKey], at: Seconds) -> None:
        self.delivered.learn(instance.id, keys, at + DELIVERED_WALL_SECONDS * self.settings.speed)

    def _take_back(self, request: Request) -> None:
        self._release(request.instance, request.epoch, request.keys)

    def _release(self, instance: InstanceId, epoch: Epoch, keys: list[BlockKey]) -> None:
        """Release a promise, unless the instance has started again since and forgot it."""
        if self._epochs.get(instance) == epoch:
            self.speculation.release(instance, keys)

    def _promise_until_confirmed(self, request: Request, at: Seconds) -> None:
        deadline = at + CONFIRMATION_WALL_SECONDS * self.settings.speed
        self._promises.append((deadline, request.instance, request.epoch, request.keys))

    def _forget_computed(self, instance: InstanceId, removed: set[BlockKey] | None = None) -> None:
        """Take back promises of prompts that were computed there and lost a block of those `removed` (None: all): what
        remains of them is in the index. Prompts that are still to be computed will be held."""
        lost = [
            promise
            for promise in self._promises
            if promise[1] == instance and (removed is None or not removed.isdisjoint(promise[3]))
        ]
        for promise in lost:
            self._promises.remove(promise)
            self._release(instance, promise[2], promise[3])

    def _settle_promises(self, now: Seconds) -> None:
        """Take back promises whose time is up: by now the engine's events have confirmed them, or never will."""
        promises = self._promises
        while promises and promises[0][0] <= now:
            _, instance, epoch, keys = promises.popleft()
            self._release(instance, epoch, keys)


def _check_step(what: str, known: int, told: int) -> None:
    """Raises ValueError where nobody can have counted so far."""
    if told > known + STEP_MAX:
        msg = f"{what} {told} is too far ahead of {known}"
        raise ValueError(msg)
