"""The fold: `State.apply(event)` turns the log into state. Synchronous, deterministic, no I/O; time is the events'
time. The leader applies its decisions at once and skips them in the log; others apply the log in order. Fenced and
repeated decisions are ignored. `holdings` applies cache events, `lifecycle` request events."""

from typing import Final, Protocol, assert_never

from msgspec import structs

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.cache import (
    AnyCacheEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheGap,
    CacheSnapshot,
)
from pointsman.contracts.codec import AnyRequestEvent, LogEvent, short_reason
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    RequestsRefused,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import Event, Stamp
from pointsman.contracts.fleet import (
    AnyFleetEvent,
    FleetEvent,
    InstanceDraining,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.requests import (
    PrefillFinished,
    PrefixCopyEnded,
    PrefixFetchEnded,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.subjects import is_leader_subject
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, Sequence, WallSeconds, engine_seconds
from pointsman.state import fold_versions, holdings, lifecycle
from pointsman.state.dead_letters import DeadLetter
from pointsman.state.fleet import Instance
from pointsman.state.fold_versions import FOLD_VERSION
from pointsman.state.parts import PoolSettings, StateParts, check_step
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.slower_tiers import RATE_SECONDS
from pointsman.state.workload import NO_INSTANCE

__all__ = ["FOLD_VERSION", "PoolSettings", "State"]

UNREGISTERED_MAX = 1000
"""Instances that report without having joined; the one silent longest is dropped first."""
EPOCH_EXPECTED_MAX = Epoch(10**13)
"""Unix ms in the year 2286: bound of a first epoch."""
EPOCHS_REMEMBERED_MAX = 10_000
"""Of instances that are there or were; of those that left, the one gone longest is dropped first."""
SETTLED_WALL_SECONDS: WallSeconds = WallSeconds(0.25)
"""What ends by time, and whose number grows with the pool, is looked through so often."""
_ANSWERS: Final = (PrefillFinished, RequestFinished)


class Entry(Protocol):
    @property
    def sequence(self) -> Sequence: ...
    @property
    def subject(self) -> str: ...
    @property
    def event(self) -> LogEvent | None: ...
    @property
    def problem(self) -> str: ...


class State(StateParts):
    def apply(self, event: LogEvent, sequence: Sequence = 0) -> None:
        """`sequence`: place in the log, or 0 for a decision applied before it is logged. Never raises: an event that
        fails keeps its partial effect, the same for every reader, and becomes a dead letter."""
        if sequence:
            self.sequence = sequence
        try:
            self._apply(event, sequence)
        except Exception as error:  # noqa: BLE001 - an entry cannot be taken back: no reader could fold beyond it
            reason = short_reason(f"{type(error).__name__}: {error}")
            self.dead_letters.add(DeadLetter(sequence, type(event).__name__, reason, decoded=True))

    def apply_entry(self, entry: Entry) -> None:
        if entry.event is None:
            self.skip(entry.sequence, subject=entry.subject, problem=entry.problem)
        else:
            self.apply(entry.event, entry.sequence)

    def skip(self, sequence: Sequence, *, subject: str = "", problem: str = "") -> None:
        """Skip an entry: one applied before, or one that does not decode, for the reason in `problem`."""
        self.sequence = sequence
        if problem:
            self.dead_letters.add(DeadLetter(sequence, short_reason(subject), short_reason(problem), decoded=False))
        if is_leader_subject(subject):
            self.elected = sequence  # the next election must come behind this one

    def _apply(self, event: LogEvent, sequence: Sequence) -> None:
        stamp = event.stamp
        if stamp is not None:
            if stamp.term < self.term:  # `is_fenced`, without the call
                self.fenced += 1
                return
            if not self.recent_decisions.is_news(event, self.term):
                return
        event = self._dated(event)
        if stamp is None and isinstance(event, _ANSWERS):
            self._note_answer(event)
        match event:  # families first: a check of a type costs more than most of what follows
            case RequestEvent():
                self._apply_to_request(event)
            case CacheEvent():
                self._apply_to_cache(event)
                self.fleet.note_knowledge(event.instance, event.at)
            case FleetEvent():
                self._apply_to_fleet(event)
                self.fleet.note_knowledge(event.instance, event.at)
            case LeaderElected():
                if sequence:  # a term begins at the same entry for everyone, its leader included
                    self._begin_term(event, sequence)
            case WritesLost():
                self.writes_lost += event.count
            case ScaleDecided():
                check_step("number", self.scaling.number, event.number)
                self.scaling.decide(event)
            case ScaleApplied():
                self.scaling.apply(event)
            case TenantPoliciesSet():
                self._set_policies(event)
            case ApiKeyChanged() | RequestsRefused():
                pass
            case _:
                assert_never(event)

    def _dated(self, event: LogEvent) -> LogEvent:
        """With its date by the leader's clock, where that is known. What has an end ends by the leader's own dates: any other
        clock may be wrong, and set at any time."""
        is_leaders = event.stamp is not None or isinstance(event, LeaderElected)
        if not is_leaders and isinstance(event, RequestEvent):
            request = self.workload.requests.get(event.request)
            if request is not None and request.clock_offset:
                event = structs.replace(event, at=event.at + request.clock_offset)
        self.last_at = max(self.last_at, event.at)
        if self.settings.fold_version < fold_versions.CLOCKS_DIFFER:
            self.now = self.last_at
            self.settle(event.at)
        elif is_leaders:
            self.now = event.at if abs(event.at - self.now) > self.clock_step else max(self.now, event.at)
            self.settle(self.now)
        return event

    def _note_answer(self, event: PrefillFinished | RequestFinished) -> None:
        """An engine has answered, whatever the stage of the request."""
        dated = self.settings.fold_version < fold_versions.ANSWERS_COUNTED
        self.fleet.note_answer(event.instance, event.at, dated=dated)
        request = self.workload.requests.get(event.request)
        is_there = request is not None and request.instance == event.instance
        prefiller = request.prefilled_by if request is not None and is_there else NO_INSTANCE
        self.outliers.answered(event.request, event.instance, prefiller=prefiller)

    def _begin_term(self, event: LeaderElected, sequence: Sequence) -> None:
        self.elected = sequence
        check_step("term", self.term, event.term)
        if self.term < event.term <= self.recent_decisions.term:
            self.recent_decisions = RecentDecisions()  # of decisions from before their term
        if event.term >= self.term:
            self.term = event.term
            self.note_policies(event.policy, event.settings)

    def _set_policies(self, event: TenantPoliciesSet) -> None:
        tenants = self.tenants
        if not self._is_over(event, tenants.policies_decided):
            tenants.policies_decided = self._newest(event, tenants.policies_decided)
            tenants.set_policies(event.policies, self.workload.requests.values(), event.at)

    def settle(self, now: EngineSeconds) -> None:
        """End what has an end, as the next decision would."""
        if self.promises.unconfirmed:
            holdings.settle_promises(self, now)
        interval = engine_seconds(SETTLED_WALL_SECONDS, self.settings.speed)
        if self.settings.fold_version >= fold_versions.SETTLED_AT_INTERVALS and 0 <= now - self.settled_at < interval:
            return
        self.settled_at = now
        self.delivered.settle(now)
        if self.slower:
            self.slower.settle(now)
            if self.settings.fold_version >= fold_versions.FETCHES_THAT_PAY:
                self.slower.forget_rates(now - RATE_SECONDS)

    def _apply_to_request(self, event: AnyRequestEvent) -> None:
        match event:
            case RequestArrived():
                lifecycle.arrive(self, event)
            case RequestPlaced():
                if event.settings and not self.term_settings:
                    self.note_policies(event.policy, event.settings)
                lifecycle.place(self, event)
            case RequestGranted():
                lifecycle.grant(self, event)
            case PrefillFinished():
                lifecycle.finish_prefill(self, event)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                lifecycle.end(self, event)
            case RequestMigrated():
                lifecycle.migrate(self, event)
            case RequestHandedOver():
                lifecycle.hand_over(self, event, event.instance)
            case HandOverRefused():
                lifecycle.hand_over(self, event, event.source)
            case PrefixCopyEnded():
                lifecycle.end_copy(self, event)
            case PrefixFetchEnded():
                lifecycle.end_fetch(self, event)
            case RequestAttemptFailed():
                lifecycle.fail_attempt(self, event)
            case MigrationRefused():
                pass
            case _:
                assert_never(event)

    def _apply_to_cache(self, event: AnyCacheEvent) -> None:
        if not self.knows_keys:
            holdings.count(self, event)
            return
        match event:
            case BlocksStored():
                holdings.store(self, event)
            case BlocksRemoved():
                holdings.remove(self, event)
            case CacheCleared():
                holdings.clear(self, event)
            case CacheGap():
                holdings.note_gap(self, event)
            case CacheSnapshot():
                holdings.replace(self, event)
            case _:
                assert_never(event)

    def _apply_to_fleet(self, event: AnyFleetEvent) -> None:
        match event:
            case InstanceReported():
                self._report(event)
            case InstanceJoined():
                self._join(event)
            case InstanceProbed():
                if probed := self.current(event.instance, event.epoch):
                    probed.parity = event.parity
            case InstanceSuspected():
                known = self.current(event.instance, event.epoch)
                if known is not None and not self._heard_since(event, known):
                    self.fleet.suspect(event.instance)
            case InstanceDraining() | InstanceUndrained() | InstanceRoleChanged():
                if self._is_there_since(event):
                    self._drain(event)
            case InstanceEjected() | InstanceUnejected():
                self._eject(event)
            case InstanceLeft():
                self._leave(event)
            case _:
                assert_never(event)

    def _heard_since(self, event: InstanceSuspected, known: Instance) -> bool:
        """Whether the log has a report before this decision that its leader had not read."""
        checked = self.settings.fold_version >= fold_versions.CLOCKS_DIFFER
        return checked and event.stamp is not None and event.stamp.as_of < known.reported

    def _is_over(self, event: Event, newest: Stamp | None) -> bool:
        """`newest`: of the decisions about the same. A write that is sent again can come behind later ones."""
        if event.stamp is None or newest is None or self.settings.fold_version < fold_versions.IN_ORDER:
            return False
        return event.stamp.order <= newest.order

    def _newest(self, event: Event, newest: Stamp | None) -> Stamp | None:
        """Not one of a term in which nobody was elected: it is forged, and later ones count."""
        return newest if event.stamp is None or event.stamp.term > self.term else event.stamp

    def _is_there_since(self, event: InstanceDraining | InstanceUndrained | InstanceRoleChanged | InstanceLeft) -> bool:
        """Whether the instance has been there without a break since this was decided; a join under a newer epoch is no
        break."""
        known = self.fleet.get(event.instance)
        if known is None or event.epoch >= known.epoch:
            return known is not None and event.epoch == known.epoch
        return event.stamp is not None and event.stamp.as_of >= known.arrived_at

    def _drain(self, event: InstanceDraining | InstanceUndrained | InstanceRoleChanged) -> None:
        """Where its worker has announced something else since, its drain for a role is over for every reader, whether the
        decision or the announcement came first."""
        known = self.fleet[event.instance]
        if self._is_over(event, known.drain_decided):
            return
        known.drain_decided = self._newest(event, known.drain_decided)
        may_become = known.may_become(event.epoch)
        match event:
            case InstanceDraining():
                self.fleet.drain(
                    known.id,
                    draining=may_become or not event.becomes,
                    leaving=event.leaving,
                    becomes=event.becomes if may_become else "",
                    at=event.at,
                )
            case InstanceUndrained():
                self.fleet.drain(known.id, draining=False)
            case InstanceRoleChanged():
                self.fleet.change_role(known.id, event.role if may_become else known.role)

    def _join(self, event: InstanceJoined) -> None:
        newest = self.newest_epoch(event.instance)
        if event.epoch <= newest:
            return
        check_step("epoch", max(newest, EPOCH_EXPECTED_MAX), event.epoch)
        self.epochs[event.instance] = event.epoch
        self.unregistered.pop(event.instance, None)
        holdings.forget(self, event.instance)
        self.contradictions.begin(event.instance, self.sequence)
        known = self.fleet.get(event.instance)
        self.fleet.join(event).arrived_at = known.arrived_at if known is not None else self.sequence
        if event.instance in self.workload.queues:
            self.workload.queues[event.instance].aborted_at = 0.0
        self.index.add(event.instance)
        self.slower.join(event.instance, shared_store=event.shared_store)
        self.outliers.joined(event.instance, event.at)
        self.decode_load.joined(event.instance, event.at)
        for tracker in self.trackers:
            tracker.joined(event.instance, event.at)

    def _report(self, event: InstanceReported) -> None:
        instance = self.current(event.instance, event.epoch)
        if instance is None:
            if event.instance not in self.fleet or event.epoch >= self.epochs[event.instance]:
                self.unregistered.pop(event.instance, None)
                self.unregistered[event.instance] = event.at
                if len(self.unregistered) > UNREGISTERED_MAX:
                    del self.unregistered[next(iter(self.unregistered))]
            return
        is_new = event.at > instance.heard_at
        back = self.settings.fold_version >= fold_versions.CLOCKS_DIFFER
        self.fleet.apply_report(event, self.sequence, clock_may_go_back=back)
        holdings.compare_with_report(self, instance, event, is_new=is_new)

    def _eject(self, event: InstanceEjected | InstanceUnejected) -> None:
        known = self.current(event.instance, event.epoch)
        if known is None or self._is_over(event, known.ejection_decided):
            return
        known.ejection_decided = self._newest(event, known.ejection_decided)
        if isinstance(event, InstanceEjected):
            why = f"{event.cause}: {event.detail}"
            self.fleet.eject(event.instance)
            self.outliers.ejected(event.instance, event.at, seconds=event.seconds, number=event.number, why=why)
            return
        self.fleet.uneject(event.instance, half_open=event.half_open)
        first = self.next_grant_place(event.at)
        self.outliers.unejected(event.instance, event.at, half_open=event.half_open, first=first)
        if not event.half_open:
            self.forget_speed(event.instance)  # learned from a failing engine

    def _leave(self, event: InstanceLeft) -> None:
        if self.current(event.instance, event.epoch):
            holdings.forget(self, event.instance)
            self.fleet.leave(event.instance)
            self._note_gone(event.instance)
            self.drop_idle_queue(event.instance)
            self.outliers.left(event.instance)
            self.decode_load.left(event.instance, event.at)
            for tracker in self.trackers:
                tracker.left(event.instance, event.at)
        elif event.stamp is not None and self._is_there_since(event):
            self.fleet.note_restart(event.instance, event.stamp.as_of + 1)
        elif event.instance not in self.fleet and self.settings.fold_version >= fold_versions.LATE_JOINS:
            self._left_before(event)
        self.unregistered.pop(event.instance, None)

    def _left_before(self, event: InstanceLeft) -> None:
        """Of an instance whose join the log has dropped: a late copy of the join does not bring it back."""
        newest = self.newest_epoch(event.instance)
        check_step("epoch", max(newest, EPOCH_EXPECTED_MAX), event.epoch)
        self.epochs[event.instance] = max(newest, event.epoch)
        self._note_gone(event.instance)

    def _note_gone(self, instance: InstanceId) -> None:
        """Its epoch is remembered, so that a late copy of its join does not bring it back."""
        if self.settings.fold_version < fold_versions.EPOCHS_BOUNDED:
            return
        self.epochs[instance] = self.epochs.pop(instance)
        if len(self.epochs) > EPOCHS_REMEMBERED_MAX:
            del self.epochs[next(name for name in self.epochs if name not in self.fleet)]
