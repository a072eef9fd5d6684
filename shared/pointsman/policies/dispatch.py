"""The leader's turn: what happens to the log when a request arrives, ends, or an instance changes.

`Dispatcher` asks the policies, applies each decision to State at once and returns it to be published. It owns no
clock and no I/O: the scheduler service drives it in real time, the simulator in virtual time, replay from the log.

Fresh accounting is worth more than any formula: a placement is booked before the next request is looked at.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

import msgspec

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import (
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, InstanceSuspected, InstanceUndrained, Patience
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION, AdmissionPolicy, Refusal
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES, OrderingPolicy
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES, RebalancingPolicy
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.rebalancing.recheck import Objection, Recheck
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES, NoInstance, RoutingPolicy
from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES, ScalingPolicy
from pointsman.primitives import InstanceId, RequestId, Seconds, Term, Tokens
from pointsman.state.fleet import Instance, Status
from pointsman.state.memories.base import Memory
from pointsman.state.state import State
from pointsman.state.workload import NOWHERE, Line, Request, Stage

P = TypeVar("P", RoutingPolicy, AdmissionPolicy, OrderingPolicy, RebalancingPolicy, ScalingPolicy)

ADMISSION_PREFIX = "admission."
ORDERING_PREFIX = "order."


class UnknownPolicyError(ValueError):
    """No policy of that name, or no such setting; the message lists those there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """The policies of a pool and the bounds of an instance's window."""

    routing: RoutingPolicy
    admission: AdmissionPolicy
    ordering: OrderingPolicy
    prefill_window_tokens: Tokens = 16_384
    """Uncached prompt tokens that may be inside an engine before their first token. One request always may."""
    running_max: int = 256
    """Requests that may be inside an engine at all."""
    pending_max: int = 10_000
    """Requests that may wait in the pool; more are refused."""
    hold_seconds: Seconds = 0.0
    """Engine seconds for which arrivals wait while no instance is ready, because a scaler may start one; 0: none does."""
    hold_max: int = 1_000
    """Requests that may wait so."""

    def memories(self) -> tuple[Memory, ...]:
        """Fresh memories for a State that these policies will read."""
        return (*self.routing.memories(), *self.admission.memories(), *self.ordering.memories())

    @property
    def settings(self) -> Settings:
        """Everything that a recomputation of a decision must know beyond its policy's name, for the event."""
        return {
            **self.routing.settings,
            **{ADMISSION_PREFIX + name: value for name, value in self.admission.settings.items()},
            **{ORDERING_PREFIX + name: value for name, value in self.ordering.settings.items()},
            "admission": self.admission.name,
            "ordering": self.ordering.name,
            "prefill_window_tokens": self.prefill_window_tokens,
            "running_max": self.running_max,
            "pending_max": self.pending_max,
            **({"hold_seconds": self.hold_seconds, "hold_max": self.hold_max} if self.hold_seconds else {}),
        }


def policy_set(
    *,
    routing: str = DEFAULT_ROUTING,
    admission: str = DEFAULT_ADMISSION,
    ordering: str = DEFAULT_ORDERING,
    settings: Settings | None = None,
    prefill_window_tokens: Tokens = 16_384,
    running_max: int = 256,
    pending_max: int = 10_000,
    hold_seconds: Seconds = 0.0,
    hold_max: int = 1_000,
) -> PolicySet:
    """Policies by name. `settings` are those of the routing policy; names that begin with `admission.` or `order.`
    are for the other two. Raises UnknownPolicyError."""
    own, for_admission, for_ordering = _split(settings or {})
    return PolicySet(
        routing=_made("routing policy", routing, ROUTING_POLICIES, own),
        admission=_made("admission policy", admission, ADMISSION_POLICIES, for_admission),
        ordering=_made("ordering policy", ordering, ORDERING_POLICIES, for_ordering),
        prefill_window_tokens=prefill_window_tokens,
        running_max=running_max,
        pending_max=pending_max,
        hold_seconds=hold_seconds,
        hold_max=hold_max,
    )


def rebalancing_policy(name: str = DEFAULT_REBALANCING, settings: Settings | None = None) -> RebalancingPolicy:
    """A rebalancing policy by name. Raises UnknownPolicyError."""
    return _made("rebalancing policy", name, REBALANCING_POLICIES, settings or {})


def scaling_policy(name: str = DEFAULT_SCALING, settings: Settings | None = None) -> ScalingPolicy:
    """A scaling policy by name. Raises UnknownPolicyError."""
    return _made("scaling policy", name, SCALING_POLICIES, settings or {})


def recorded_policy_set(routing: str, settings: Settings) -> PolicySet:
    """The policies that an event names: its `policy`, and its `settings` as `PolicySet.settings` wrote them.

    Raises UnknownPolicyError.
    """
    rest = dict(settings)
    try:
        bounds = {name: int(rest.pop(name)) for name in ("prefill_window_tokens", "running_max", "pending_max")}
        hold_seconds, hold_max = float(rest.pop("hold_seconds", 0.0)), int(rest.pop("hold_max", 1_000))
        return policy_set(
            routing=routing,
            admission=str(rest.pop("admission")),
            ordering=str(rest.pop("ordering")),
            settings=rest,
            hold_seconds=hold_seconds,
            hold_max=hold_max,
            **bounds,
        )
    except KeyError as error:
        message = f"the settings of {routing or 'no policy'} lack {error}"
        raise UnknownPolicyError(message) from error


def reason_to_relocate(instance: InstanceId) -> str:
    """What RequestMigrated says of a request that had to leave this instance."""
    return f"{instance} takes no requests any more"


def _split(settings: Settings) -> tuple[Settings, Settings, Settings]:
    """Settings of the routing, the admission and the ordering policy, their prefixes taken off."""
    parts: dict[str, Settings] = {"": {}, ADMISSION_PREFIX: {}, ORDERING_PREFIX: {}}
    for name, value in settings.items():
        prefix = next(p for p in (ADMISSION_PREFIX, ORDERING_PREFIX, "") if name.startswith(p))
        parts[prefix][name.removeprefix(prefix)] = value
    return parts[""], parts[ADMISSION_PREFIX], parts[ORDERING_PREFIX]


def _made(kind: str, name: str, known: Mapping[str, type[P]], settings: Settings) -> P:
    """The policy of that name with these settings."""
    _require(kind, name, known)
    chosen = known[name]
    for setting in settings:
        _require(f"setting of {name}", setting, [field.name for field in fields(chosen)])
    try:
        return msgspec.convert(settings, chosen, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        message = f"{name}: {error}"
        raise UnknownPolicyError(message) from error


def _require(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        message = f"there is no {kind} {name}; there are: {names}"
        raise UnknownPolicyError(message)


class Dispatcher:
    """One term of leadership over one State. Returned events are applied already and are to be published in order."""

    def __init__(
        self,
        state: State,
        policies: PolicySet,
        *,
        term: Term,
        seen: State | None = None,
        on_record: Callable[[LogEvent], LogEvent] | None = None,
    ) -> None:
        """`seen`: what policies are shown instead of `state`, where a simulation lets knowledge lag behind.
        `on_record`: replay's; given each decision, the one that the log has in its place, which is applied instead."""
        self.state = state
        self._seen = seen or state
        self._on_record = on_record
        self.policies = policies
        self._settings = policies.settings  # gathered once: every decision tells them
        self.term = term
        self.decided = 0
        """Decisions of this term so far."""

    def route(self, command: RouteRequest, now: Seconds) -> list[LogEvent]:
        """Place a new request, or place one again whose engine failed. A repeated command gives no events, unless a
        leader before us took the request in and got no further."""
        known = self.state.workload.requests.get(command.request)
        if known is None and self.state.workload.end_of(command.request):
            return []
        if known is not None and _has_its_place(known, command.attempt):
            return []
        events: list[LogEvent] = []
        if known is None:
            known = self._arrive(command, now, events)
        source = known.instance
        self._place(known, command, now, events)
        self._grant_next(known.instance, now, events)
        if source and source != known.instance:
            self._grant_next(source, now, events)
        return events

    def cancel(self, request: RequestId, reason: str, now: Seconds) -> list[LogEvent]:
        """End a request that was not granted yet; of any other this is a no-op without events.

        One that is not known may still be on its way here: it is ended too, and will be refused when it comes.
        """
        known = self.state.workload.requests.get(request)
        if known is None and self.state.workload.end_of(request) is None:
            events: list[LogEvent] = []
            self._decide(events, lambda s: RequestCancelled(at=now, stamp=s, request=request, reason=reason))
            return events
        if known is None or known.stage not in (Stage.ARRIVED, Stage.PENDING):
            return []
        return self._end_cancelled(known, reason, now, sent_to=NOWHERE)

    def abandon(self, request: RequestId, reason: str, now: Seconds) -> list[LogEvent]:
        """End a request whatever its stage: nobody is left who would."""
        known = self.state.workload.requests.get(request)
        return [] if known is None else self._end_cancelled(known, reason, now, sent_to=known.instance)

    def grant_waiting(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        """Grant what now fits into the instance's window; called when something left it."""
        events: list[LogEvent] = []
        self._grant_next(instance, now, events)
        return events

    def migrate(self, plan: MigrationPlan, now: Seconds) -> list[LogEvent]:
        """Carry out a plan as far as it still holds (`rebalancing.recheck`): each of its moves gives a RequestMigrated
        or a MigrationRefused, in their order."""
        events: list[LogEvent] = []
        touched: set[InstanceId] = set()
        recheck = Recheck(self.state, now)
        for migration in plan.migrations:
            offered = recheck.judge(migration)
            if isinstance(offered, Objection):
                self._refuse_move(migration, offered, plan, now, events)
            else:
                self._make_move(migration, offered, plan, now, events)
                touched |= {migration.source, migration.target}
        for instance in sorted(touched):
            self._grant_next(instance, now, events)
        return events

    def drain(self, instance: InstanceId, reason: str, now: Seconds, *, leaving: bool) -> list[LogEvent]:
        """Place nothing there any more, and move what waits for it. No events where that is so already."""
        known = self.state.fleet.get(instance)
        if known is None or (known.draining and known.leaving == leaving):
            return []
        events: list[LogEvent] = []
        self._decide(
            events,
            lambda s: InstanceDraining(
                at=now, stamp=s, instance=instance, epoch=known.epoch, reason=reason, leaving=leaving
            ),
        )
        return events + self.relocate_pending(now)

    def undrain(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        """Let an instance take requests again. No events where it does."""
        known = self.state.fleet.get(instance)
        if known is None or not known.draining:
            return []
        events: list[LogEvent] = []
        self._decide(events, lambda s: InstanceUndrained(at=now, stamp=s, instance=instance, epoch=known.epoch))
        return events + self.relocate_pending(now)

    def place_held(self, now: Seconds) -> list[LogEvent]:
        """Place what waits for an instance to come, and refuse what has waited for as long as it may."""
        events: list[LogEvent] = []
        for request in list(self.state.workload.requests.values()):
            if request.stage is Stage.ARRIVED:
                self._place_again(request, now, events)
        return events

    def _place_again(self, request: Request, now: Seconds, events: list[LogEvent]) -> None:
        self._place(request, asked_again(request, request.attempt, request.excluded), now, events)
        self._grant_next(request.instance, now, events)

    def relocate_pending(self, now: Seconds) -> list[LogEvent]:
        """Move requests that wait for an instance that takes none any more. Those without an alternative stay."""
        events: list[LogEvent] = []
        ready = self.state.fleet.ready
        for instance, line in list(self.state.workload.lines.items()):
            if instance in ready or not line.pending or not ready:
                continue
            for request in list(line.pending.values()):
                self._migrate(request, now, events, reason=reason_to_relocate(instance))
        for instance in ready:
            self._grant_next(instance, now, events)
        return events

    def check_liveness(
        self, now: Seconds, *, heard_since: Seconds, suspect_after: Seconds, leave_after: Seconds
    ) -> list[LogEvent]:
        """Suspect instances whose worker is silent, and let go of those silent for long.

        `heard_since`: silence before this moment does not count (the leader was not there to hear).
        """
        events: list[LogEvent] = []
        patience = Patience(heard_since=heard_since, suspect_after=suspect_after, leave_after=leave_after)
        for instance in self.state.fleet.instances:
            silent = now - max(instance.heard_at, heard_since)
            if silent > leave_after:
                self._let_go(instance, silent, patience, now, events)
            elif silent > suspect_after and instance.status is not Status.SUSPECTED:
                self._suspect(instance, silent, patience, now, events)
        return events

    def _end_cancelled(self, request: Request, reason: str, now: Seconds, *, sent_to: InstanceId) -> list[LogEvent]:
        """Write the end and grant what it made room for. `sent_to`: the engine that has it, or NOWHERE."""
        freed = request.instance
        events: list[LogEvent] = []
        self._decide(
            events,
            lambda s: RequestCancelled(at=now, stamp=s, request=request.id, reason=reason, instance=sent_to),
        )
        self._grant_next(freed, now, events)
        return events

    def _suspect(
        self, instance: Instance, silent: Seconds, patience: Patience, now: Seconds, events: list[LogEvent]
    ) -> None:
        self._decide(
            events,
            lambda s: InstanceSuspected(
                at=now,
                stamp=s,
                instance=instance.id,
                epoch=instance.epoch,
                silent_seconds=silent,
                patience=patience,
            ),
        )

    def _let_go(
        self, instance: Instance, silent: Seconds, patience: Patience, now: Seconds, events: list[LogEvent]
    ) -> None:
        reason = f"not heard of for {silent:.1f} s"
        self._decide(
            events,
            lambda s: InstanceLeft(
                at=now, stamp=s, instance=instance.id, epoch=instance.epoch, reason=reason, patience=patience
            ),
        )

    def _arrive(self, command: RouteRequest, now: Seconds, events: list[LogEvent]) -> Request:
        self._decide(
            events,
            lambda s: RequestArrived(
                at=now,
                stamp=s,
                request=command.request,
                arrived_at=command.arrived_at,
                ingress=command.ingress,
                tenant=command.tenant,
                keys=command.keys,
                prompt_tokens=command.prompt_tokens,
                max_output_tokens=command.max_output_tokens,
                slo_ttft=command.slo_ttft,
                slo_tpot=command.slo_tpot,
                session=command.session,
                exact=command.exact,
                streaming=command.streaming,
            ),
        )
        return self.state.workload.requests[command.request]

    def _place(self, request: Request, command: RouteRequest, now: Seconds, events: list[LogEvent]) -> None:
        policies = self.policies
        excluded = list(command.excluded)
        view = PoolView(self._seen, request, now, excluded=command.excluded)
        try:
            choice = policies.routing.choose(view)
        except NoInstance as answer:
            if not self._may_hold(request, now):
                self._reject(request, command, Refusal("no_instance", str(answer), 1.0), [], now, events)
            return
        admitted = self._refuse_full() or policies.admission.admit(view, choice)
        if isinstance(admitted, Refusal):
            self._reject(request, command, admitted, choice.considered, now, events)
            return
        choice, option = admitted, admitted.option
        self._decide(
            events,
            lambda s: RequestPlaced(
                at=now,
                stamp=s,
                request=request.id,
                instance=option.instance,
                hit_blocks=option.hit_blocks,
                uncached_tokens=option.uncached_tokens,
                queue_seconds=option.queue_seconds,
                prefill_seconds=option.work_seconds,
                predicted_ttft=option.predicted_ttft,
                policy=policies.routing.name,
                settings=self._settings,
                reason=choice.reason,
                candidates=[o.as_candidate() for o in choice.considered],
                attempt=command.attempt,
                excluded=excluded,
            ),
        )

    def _may_hold(self, request: Request, now: Seconds) -> bool:
        """Whether it may wait for an instance that is not there yet. What was sent to an engine before may not."""
        policies = self.policies
        if request.stage is not Stage.ARRIVED or request.excluded or self.state.fleet.ready:
            return False
        if now - request.arrived_at >= policies.hold_seconds:
            return False
        held = sum(known.stage is Stage.ARRIVED for known in self.state.workload.requests.values())
        return held <= policies.hold_max

    def _refuse_full(self) -> Refusal | None:
        waiting = sum(len(line.pending) for line in self.state.workload.lines.values())
        if waiting < self.policies.pending_max:
            return None
        return Refusal("queue_full", f"{waiting} requests wait already", 1.0)

    def _reject(
        self,
        request: Request,
        command: RouteRequest,
        refusal: Refusal,
        considered: list[Option],
        now: Seconds,
        events: list[LogEvent],
    ) -> None:
        self._decide(
            events,
            lambda s: RequestRejected(
                at=now,
                stamp=s,
                request=request.id,
                reason=refusal.reason,
                detail=refusal.detail,
                retry_after=refusal.retry_after,
                policy=self.policies.routing.name,
                settings=self._settings,
                candidates=[o.as_candidate() for o in considered],
                attempt=command.attempt,
                excluded=list(command.excluded),
            ),
        )

    def _migrate(self, request: Request, now: Seconds, events: list[LogEvent], *, reason: str) -> None:
        view = PoolView(self.state, request, now, excluded=request.excluded)
        try:
            option = self.policies.routing.choose(view).option
        except NoInstance:
            return
        self._move(request, option, now, events, reason=reason)

    def _make_move(
        self, migration: Migration, option: Option, plan: MigrationPlan, now: Seconds, events: list[LogEvent]
    ) -> None:
        self._decide(
            events,
            lambda s: RequestMigrated(
                at=now,
                stamp=s,
                request=migration.request,
                source=migration.source,
                instance=option.instance,
                hit_blocks=option.hit_blocks,
                uncached_tokens=option.uncached_tokens,
                prefill_seconds=option.work_seconds,
                predicted_ttft=option.predicted_ttft,
                reason=migration.reason,
                plan=plan.id,
                policy=plan.policy,
                planned_as_of=plan.as_of,
                benefit=migration.benefit,
            ),
        )

    def _refuse_move(
        self, migration: Migration, objection: Objection, plan: MigrationPlan, now: Seconds, events: list[LogEvent]
    ) -> None:
        self._decide(
            events,
            lambda s: MigrationRefused(
                at=now,
                stamp=s,
                request=migration.request,
                source=migration.source,
                instance=migration.target,
                reason=objection.reason,
                detail=objection.detail,
                plan=plan.id,
                policy=plan.policy,
                planned_as_of=plan.as_of,
                benefit=migration.benefit,
            ),
        )

    def _move(self, request: Request, option: Option, now: Seconds, events: list[LogEvent], *, reason: str) -> None:
        source = request.instance
        self._decide(
            events,
            lambda s: RequestMigrated(
                at=now,
                stamp=s,
                request=request.id,
                source=source,
                instance=option.instance,
                hit_blocks=option.hit_blocks,
                uncached_tokens=option.uncached_tokens,
                prefill_seconds=option.work_seconds,
                predicted_ttft=option.predicted_ttft,
                reason=reason,
            ),
        )

    def _grant_next(self, instance_id: InstanceId, now: Seconds, events: list[LogEvent]) -> None:
        instance = self.state.fleet.get(instance_id)
        line = self.state.workload.lines.get(instance_id)
        if instance is None or line is None or instance.status not in (Status.READY, Status.DRAINING):
            return
        self._assume_prefills(instance_id, line, now, events)
        while line.pending:
            request = self.policies.ordering.first(line, now, self.state)
            if not self._has_room(line, request):
                return
            self._grant(request, now, events)

    def _assume_prefills(self, instance: InstanceId, line: Line, now: Seconds, events: list[LogEvent]) -> None:
        """Free the window of prefills that must be over by now, whose first token nobody will see: not streamed."""
        factor = self.state.correction(instance)
        for request in list(line.prefill.values()):
            if not request.streaming and now >= request.granted_at + request.engine_seconds * factor:
                self._assume_prefill(request, now, events)

    def _assume_prefill(self, request: Request, now: Seconds, events: list[LogEvent]) -> None:
        self._decide(
            events,
            lambda s: PrefillFinished(
                at=now,
                stamp=s,
                request=request.id,
                instance=request.instance,
                ttft=now - request.arrived_at,
                prefill=now - request.granted_at,
            ),
        )

    def _grant(self, request: Request, now: Seconds, events: list[LogEvent]) -> None:
        self._decide(
            events,
            lambda s: RequestGranted(
                at=now, stamp=s, request=request.id, instance=request.instance, attempt=request.attempt
            ),
        )

    def _has_room(self, line: Line, request: Request) -> bool:
        if len(line.prefill) + len(line.decoding) >= self.policies.running_max:
            return False
        return not line.prefill or line.prefill_tokens + request.uncached_tokens <= self.policies.prefill_window_tokens

    def _decide(self, events: list[LogEvent], event_with: Callable[[Stamp], LogEvent]) -> None:
        self.decided += 1
        event = event_with(Stamp(term=self.term, number=self.decided, as_of=self.state.sequence))
        if self._on_record is not None:
            event = self._on_record(event)
        self.state.apply(event)
        events.append(event)


def asked_again(request: Request, attempt: int, excluded: Iterable[InstanceId]) -> RouteRequest:
    """The command by which an ingress asks for a place for a request that the leader knows already."""
    return RouteRequest(
        request=request.id,
        ingress="",
        arrived_at=request.arrived_at,
        tenant=request.tenant,
        keys=b"",
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        slo_ttft=request.slo_ttft,
        slo_tpot=request.slo_tpot,
        attempt=attempt,
        excluded=list(excluded),
    )


def _has_its_place(request: Request, attempt: int) -> bool:
    """Whether asking for this attempt is no news. A request that only arrived was taken in by an earlier leader."""
    return request.stage is not Stage.ARRIVED and (attempt <= request.attempt or _is_being_delivered(request))


def _is_being_delivered(request: Request) -> bool:
    """Whether the client has seen a part of the answer. One that is not streamed is only assumed to be decoding."""
    return request.stage is Stage.DECODING and request.streaming
