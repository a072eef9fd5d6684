"""A reference model of the pool, folded from log entries in the log's or a leader's order. Shares no code with
`pointsman.state` and `pointsman.policies`: its rules are those of docs/events.md and docs/policies.md. Does not model
trackers of single policies, nor decode speed."""

from msgspec import structs

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import (
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
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, Sequence
from pointsman_lab.torture.pool_records import NO_INSTANCE, ModelledInstance
from pointsman_lab.torture.pool_requests import PoolRequests

CLOCK_SET_SECONDS: EngineSeconds = 60.0
"""Wall seconds from one date of the leader to the next: more, either way, and its clock was set."""


class PoolModel(PoolRequests):
    def apply(self, event: LogEvent | None, sequence: Sequence = 0) -> bool:
        """Applies an entry (None: undecodable), or with `sequence` 0 a decision before it is in the log. Returns
        whether it counts: not from a deposed leader, nor twice."""
        self.sequence = sequence or self.sequence
        if event is None:
            return False
        if event.stamp is not None:
            if event.stamp.term < self.term:
                self.fenced += 1
                return False
            decision = (event.stamp.term, event.stamp.number)
            if decision in self._decided:
                return False
            self._decided.add(decision)
        event = self._dated(event)
        if event.stamp is None and isinstance(event, PrefillFinished | RequestFinished):
            request = self.requests.get(event.request)
            there = request is not None and request.instance == event.instance
            prefilled_by = request.prefilled_by if request is not None and there else NO_INSTANCE
            self.health.answers(event.request, event.instance, prefilled_by)
        match event:
            case InstanceJoined():
                self._join(event)
            case InstanceLeft():
                self._leave(event)
            case InstanceReported():
                if (instance := self._current(event.instance, event.epoch)) is not None:
                    instance.receive(event, self.now)
                    instance.reported = self.sequence
                    self._compare_models()
            case InstanceProbed():
                if (instance := self._current(event.instance, event.epoch)) is not None:
                    instance.parity = event.parity
            case InstanceSuspected():
                instance = self._current(event.instance, event.epoch)
                if instance is not None and not (event.stamp is not None and event.stamp.as_of < instance.reported):
                    instance.suspected = True
            case InstanceDraining() | InstanceUndrained() | InstanceRoleChanged():
                if self._means_present(event):
                    self._drain(event)
            case InstanceEjected() | InstanceUnejected():
                if (instance := self._current(event.instance, event.epoch)) is not None:
                    self._eject(instance, event)
            case CacheEvent():
                instance = self.instances.get(event.instance)
                if instance is not None and instance.apply(event):
                    self._evict(event)
            case RequestAttemptFailed():
                self._fail(event)
            case RequestArrived():
                self._arrive(event)
            case RequestPlaced():
                self._place(event)
            case RequestMigrated():
                self._migrate(event)
            case RequestGranted():
                self._grant(event)
            case PrefillFinished():
                self._first_token(event)
            case RequestHandedOver():
                self._hand_over(event, event.instance)
            case HandOverRefused():
                self._hand_over(event, event.source)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                self._end(event)
            case LeaderElected():
                self.term = max(self.term, event.term if sequence else 0)
            case _:
                pass
        self._forget_departed()
        return True

    def _dated(self, event: LogEvent) -> LogEvent:
        """By the leader's clock, if that is known; what has an end ends by no other."""
        known = event.stamp is not None or isinstance(event, LeaderElected)
        if not known and isinstance(event, RequestEvent):
            request = self.requests.get(event.request)
            if request is not None and request.offset is not None:
                event = structs.replace(event, at=event.at + request.offset)
        if known:
            apart = abs(event.at - self.now) > CLOCK_SET_SECONDS * self.speed
            self.now = event.at if apart else max(self.now, event.at)
            self._settle(self.now)
        return event

    def _current(self, instance: InstanceId, epoch: Epoch) -> ModelledInstance | None:
        known = self.instances.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def _drain(self, event: InstanceDraining | InstanceUndrained | InstanceRoleChanged) -> None:
        """A change of role counts only while the worker announces what it did when it was decided."""
        known = self.instances[event.instance]
        if event.stamp is not None:
            decision = (event.stamp.term, event.stamp.number)
            if decision < known.drain_decided:
                return
            known.drain_decided = decision
        role = event.becomes if isinstance(event, InstanceDraining) else ""
        holds = known.switching and event.epoch >= known.announced_since
        known.draining = isinstance(event, InstanceDraining) and (not role or holds)
        known.draining_since = event.at
        known.becomes = role if holds else ""
        if isinstance(event, InstanceRoleChanged) and holds:
            known.role = event.role

    def _means_present(self, event: InstanceDraining | InstanceUndrained | InstanceRoleChanged | InstanceLeft) -> bool:
        """Whether a decision about an earlier epoch applies to the current one."""
        known = self.instances.get(event.instance)
        if known is None:
            return False
        before = event.epoch < known.epoch and event.stamp is not None and event.stamp.as_of >= known.arrived_at
        return event.epoch == known.epoch or before

    def _join(self, event: InstanceJoined) -> None:
        if event.epoch <= self.newest_epoch(event.instance):
            return
        self._newest[event.instance] = event.epoch
        self._forget(event.instance)
        self.health.joined(event.instance)
        self._aborted.pop(event.instance, None)
        before = self.instances.get(event.instance)
        same = before is not None and event.role_switching and before.announced == event.role
        changed = before is not None and before.becomes != "" and not same
        self.instances[event.instance] = ModelledInstance(
            epoch=event.epoch,
            arrived_at=before.arrived_at if before is not None else self.sequence,
            cost=event.prefill,
            engine_block_tokens=event.engine_block_tokens,
            kv_capacity_tokens=event.kv_capacity_tokens,
            role=before.role if before is not None and same else event.role,
            announced=event.role,
            announced_since=before.announced_since if before is not None and same else event.epoch,
            switching=event.role_switching,
            becomes=before.becomes if before is not None and same else "",
            draining_since=before.draining_since if before is not None else 0.0,
            drain_decided=before.drain_decided if before is not None else (0, 0),
            model=event.model,
            model_since=before.model_since if before is not None and before.model == event.model else event.epoch,
            context=event.max_model_len,
            cache=event.cache,
            certain=event.certain,
            adapters=frozenset(event.adapters),
            aliases=frozenset(event.aliases),
            heard_at=event.at,
            draining=before is not None and before.draining and not changed,
            counted=before is not None and before.model == event.model and before.counted,
        )
        self._compare_models()

    def _leave(self, event: InstanceLeft) -> None:
        if self._current(event.instance, event.epoch) is not None:
            self._forget(event.instance)
            self.health.left(event.instance)
            del self.instances[event.instance]
            self._compare_models()
        elif event.stamp is not None and self._means_present(event):
            known = self.instances[event.instance]
            known.draining, known.arrived_at, known.model_since = False, event.stamp.as_of + 1, known.epoch
            known.role, known.becomes, known.announced_since = known.announced, "", known.epoch
            self._compare_models()

    def _compare_models(self) -> None:
        """The pool's model is that of most instances that have served; of several, that of the longest."""
        served = {name: k for name, k in self.instances.items() if k.counted} or self.instances
        models = [known.model for known in served.values()]
        longest = sorted((-models.count(k.model), k.model_since, name, k.model) for name, k in served.items())
        for known in self.instances.values():
            known.misfit = known.model != longest[0][-1]

    def _forget(self, instance: InstanceId) -> None:
        self._promises = [promise for promise in self._promises if promise.instance != instance]
        self._delivered = [told for told in self._delivered if told.instance != instance]
        self.learned.pop(instance, None)
        self.paces.pop(instance, None)

    def _forget_departed(self) -> None:
        """What the last requests taught at an instance that is not there."""
        departed = (self.paces.keys() | self.learned.keys()) - self.instances.keys()
        for name in departed - {place for r in self.requests.values() for place in (r.instance, r.decode)}:
            self._forget(name)
            self.health.left(name)

    def _eject(self, instance: ModelledInstance, event: InstanceEjected | InstanceUnejected) -> None:
        if event.stamp is not None:
            decision = (event.stamp.term, event.stamp.number)
            if decision < instance.ejection_decided:
                return
            instance.ejection_decided = decision
        instance.ejected = isinstance(event, InstanceEjected)
        instance.half_open = isinstance(event, InstanceUnejected) and event.half_open
        if isinstance(event, InstanceEjected):
            self.health.ejected(event, self.grants + 1)
            return
        self.health.unejected(event, self.grants + 1)
        if not event.half_open:
            self.paces.pop(event.instance, None)
            self.learned.pop(event.instance, None)  # taught by one that was sick

    def _fail(self, event: RequestAttemptFailed) -> None:
        known, request = self.instances.get(event.instance), self.requests.get(event.request)
        if known is None:
            return
        grant = self.grants + 1
        sent = request.sent.get(event.attempt) if request is not None and event.attempt < request.attempt else None
        if sent is not None and sent[0] == event.instance:
            if sent[1] != known.epoch:
                return  # an earlier epoch
            grant = sent[2]
        elif request is not None and event.instance in (request.instance, request.prefilled_by):
            if event.instance == request.instance and request.epoch != known.epoch:
                return
            grant = request.grant or grant
        self.health.failed(
            event.request,
            event.instance,
            event.at if request is not None else self.now,
            grant,
            proven=event.failure == "connect_failure",
            prefilled_by=event.prefilled_by if event.prefilled_by in self.instances else None,
        )
        if event.request in self.unserved:
            self.health.ended(event.request, given_up=False)
