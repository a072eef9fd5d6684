"""The leader's turn: what happens to the log when a request arrives, ends, or an instance changes.

`Dispatcher` asks the policies, applies each decision to State at once and returns it to be published. It owns no
clock and no I/O: the scheduler service drives it in real time, the simulator in virtual time, replay from the log.

Fresh accounting is worth more than any formula: a placement is booked before the next request is looked at.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import msgspec

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest, RouteRequest
from pointsman.contracts.decisions import (
    HandOverRefused,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
    LivenessTimeouts,
)
from pointsman.contracts.reasons import CancelCause, MoveCause, MoveRefusal, RejectReason, relocated
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION, AdmissionPolicy, Refusal
from pointsman.policies.decode_placement import ALONE, DEFAULT_PAIRING, Decoder, NoDecoder, Pair, Pairing, weigh
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES, OrderingPolicy
from pointsman.policies.outliers import DEFAULT_OUTLIER_DETECTION, NO_OUTLIER_DETECTION, Ejection, OutlierDetection
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES, RebalancingPolicy
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.rebalancing.migration_check import Recheck, Veto
from pointsman.policies.rebalancing.rebinding import Rebinding, Rebound, Window
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES, NoInstance, RoutingPolicy
from pointsman.policies.routing.base import Choice
from pointsman.policies.scaling import DEFAULT_SCALING, SCALING_POLICIES, ScalingPolicy
from pointsman.primitives import InstanceId, RequestId, Seconds, Term, Tokens
from pointsman.state.fleet import Instance, Status
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import NO_INSTANCE, InstanceQueue, Request, Stage

P = TypeVar(
    "P", RoutingPolicy, AdmissionPolicy, OrderingPolicy, RebalancingPolicy, ScalingPolicy, Pairing, OutlierDetection
)

ADMISSION_PREFIX = "admission."
ORDERING_PREFIX = "order."
PAIRING_PREFIX = "pair."
OUTLIER_PREFIX = "outlier."

GRANTED = (Status.READY, Status.DRAINING, Status.EJECTED)
"""Who is given what waits for it. For one that is ejected only what cannot go elsewhere waits."""

ASK_AGAIN_WALL_SECONDS: Seconds = 5.0
"""After so long it makes sense to ask again where nobody knows when an instance will be ready."""
COMING_WALL_SECONDS_MIN: Seconds = 1.0

NOT_PLANNED = MigrationPlan(as_of=0)
"""What a move that the leader makes by itself belongs to."""


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
    """Engine seconds for which arrivals wait while no instance is ready that could serve them; 0: none does."""
    hold_max: int = 1_000
    """Requests that may wait so."""
    pairing: Pairing = DEFAULT_PAIRING
    rebind: bool = False
    """Whether a rebalancer may have requests taken out of an engine before their first token (`rebalancing.rebinding`)."""
    outliers: OutlierDetection = DEFAULT_OUTLIER_DETECTION

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers for a State that these policies will read."""
        return (*self.routing.trackers(), *self.admission.trackers(), *self.ordering.trackers())

    @property
    def settings(self) -> Settings:
        """Everything that a recomputation of a term must know beyond its policy's name, for LeaderElected."""
        outliers = {OUTLIER_PREFIX + name: value for name, value in self.outliers.settings.items()}
        return {**self.placement_settings, **(outliers if self.outliers != NO_OUTLIER_DETECTION else {})}

    @property
    def placement_settings(self) -> Settings:
        """Those by which requests are placed and refused, for each such event."""
        return {
            **self.routing.settings,
            **{ADMISSION_PREFIX + name: value for name, value in self.admission.settings.items()},
            **{ORDERING_PREFIX + name: value for name, value in self.ordering.settings.items()},
            **{PAIRING_PREFIX + name: value for name, value in self.pairing.settings.items()},
            "admission": self.admission.name,
            "ordering": self.ordering.name,
            "prefill_window_tokens": self.prefill_window_tokens,
            "running_max": self.running_max,
            "pending_max": self.pending_max,
            **({"hold_seconds": self.hold_seconds, "hold_max": self.hold_max} if self.hold_seconds else {}),
            **({"rebind": True} if self.rebind else {}),
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
    rebind: bool = False,
) -> PolicySet:
    """Policies by name. `settings` are those of the routing policy; names that begin with `admission.`, `order.`,
    `pair.` or `outlier.` are for the others. Raises UnknownPolicyError."""
    own, for_admission, for_ordering, for_pairing, for_outliers = _split(settings or {})
    return PolicySet(
        routing=_made("routing policy", routing, ROUTING_POLICIES, own),
        admission=_made("admission policy", admission, ADMISSION_POLICIES, for_admission),
        ordering=_made("ordering policy", ordering, ORDERING_POLICIES, for_ordering),
        prefill_window_tokens=prefill_window_tokens,
        running_max=running_max,
        pending_max=pending_max,
        hold_seconds=hold_seconds,
        hold_max=hold_max,
        pairing=_made("way of pairing", "pair", {"pair": Pairing}, for_pairing),
        rebind=rebind,
        outliers=_made("way of outlier detection", "outlier", {"outlier": OutlierDetection}, for_outliers),
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
    if not any(name.startswith(OUTLIER_PREFIX) for name in rest):  # of a leader that ejected nobody
        rest |= {OUTLIER_PREFIX + name: value for name, value in NO_OUTLIER_DETECTION.settings.items()}
    try:
        bounds = {name: int(rest.pop(name)) for name in ("prefill_window_tokens", "running_max", "pending_max")}
        hold_seconds, hold_max = float(rest.pop("hold_seconds", 0.0)), int(rest.pop("hold_max", 1_000))
        rebind = bool(rest.pop("rebind", False))
        return policy_set(
            routing=routing,
            admission=str(rest.pop("admission")),
            ordering=str(rest.pop("ordering")),
            settings=rest,
            hold_seconds=hold_seconds,
            hold_max=hold_max,
            rebind=rebind,
            **bounds,
        )
    except KeyError as error:
        message = f"the settings of {routing or 'no policy'} lack {error}"
        raise UnknownPolicyError(message) from error


def _split(settings: Settings) -> tuple[Settings, ...]:
    """Settings of the routing, the admission and the ordering policy, of pairing and of outlier detection, their prefixes
    taken off."""
    prefixes = (ADMISSION_PREFIX, ORDERING_PREFIX, PAIRING_PREFIX, OUTLIER_PREFIX, "")
    parts: dict[str, Settings] = {prefix: {} for prefix in prefixes}
    for name, value in settings.items():
        prefix = next(p for p in parts if name.startswith(p))
        parts[prefix][name.removeprefix(prefix)] = value
    return parts[""], *(parts[prefix] for prefix in prefixes[:-1])


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


@dataclass(slots=True)
class _Turn:
    """One call of a Dispatcher: when it is, and what has been decided in it."""

    now: Seconds
    events: list[LogEvent] = field(default_factory=list)


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
        `on_record` is given each decision before it is applied; what it returns is applied instead. Replay returns the one
        that the log has in its place; the leader notes which are not written yet."""
        self.state = state
        self._seen = seen or state
        self._on_record = on_record
        self.policies = policies
        self._settings = policies.placement_settings  # gathered once: every decision tells them
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
        turn = _Turn(now)
        held = known is not None
        if known is None:
            known = self._arrive(command, turn)
        source = known.instance
        self._place(known, command.attempt, command.excluded, turn, held=held)
        self._grant_next(known.instance, turn)
        if source and source != known.instance:
            self._grant_next(source, turn)
        return turn.events

    def cancel(self, request: RequestId, cause: CancelCause, now: Seconds, *, reason: str = "") -> list[LogEvent]:
        """End a request that was not granted yet; of any other this is a no-op without events.

        One that is not known may still be on its way here: it is ended too, and will be refused when it comes.
        """
        known = self.state.workload.requests.get(request)
        if known is None and self.state.workload.end_of(request) is None:
            turn = _Turn(now)
            self._decide(
                turn,
                RequestCancelled(
                    at=now, stamp=self._stamp, request=request, reason=reason or cause.sentence, cause=cause
                ),
            )
            return turn.events
        if known is None or known.stage not in (Stage.ARRIVED, Stage.PENDING):
            return []
        return self._end_cancelled(known, cause, reason, now, sent_to=NO_INSTANCE)

    def abandon(self, request: RequestId, cause: CancelCause, now: Seconds, *, reason: str = "") -> list[LogEvent]:
        """End a request whatever its stage: nobody is left who would."""
        known = self.state.workload.requests.get(request)
        return [] if known is None else self._end_cancelled(known, cause, reason, now, sent_to=known.instance)

    def grant_waiting(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        """Grant what now fits into the instance's window; called when something left it."""
        turn = _Turn(now)
        self._grant_next(instance, turn)
        return turn.events

    def migrate(self, plan: MigrationPlan, now: Seconds) -> list[LogEvent]:
        """Carry out a plan as far as it still holds (`rebalancing.recheck`): each of its moves gives a RequestMigrated
        or a MigrationRefused, in their order."""
        turn = _Turn(now)
        touched: set[InstanceId] = set()
        recheck = Recheck(self.state, now)
        for migration in plan.migrations:
            if migration.rebind:
                made = self._rebind(migration, plan, turn)
            else:
                made = self._requeue(migration, recheck, plan, turn)
            if made:
                touched |= {migration.source, migration.target}
        for instance in sorted(touched):
            self._grant_next(instance, turn)
        return turn.events

    def _rebind(self, migration: Migration, plan: MigrationPlan, turn: _Turn) -> bool:
        """Take a request out of its engine and grant it at its target at once, or refuse that; whether it was done."""
        policies = self.policies
        window = Window(policies.prefill_window_tokens, policies.running_max)
        judged: Rebound | Veto = Veto(MoveRefusal.REBIND_OFF, "the scheduler was not told --rebind")
        if policies.rebind:
            judged = Rebinding(self.state, turn.now, window).judge(migration)
        if isinstance(judged, Veto):
            self._refuse_move(migration, judged, plan, turn)
            return False
        self._move(migration, judged.option, NO_INSTANCE, plan, turn, cause=MoveCause.REBOUND, wasted=judged.wasted)
        self._grant(self.state.workload.requests[migration.request], turn)
        return True

    def _requeue(self, migration: Migration, recheck: Recheck, plan: MigrationPlan, turn: _Turn) -> bool:
        """Let a request wait at its target, or refuse that; whether it was done."""
        offered = recheck.judge(migration)
        if isinstance(offered, Option):
            request = self.state.workload.requests[migration.request]
            decode = self._decode_after_move(request, offered.instance, turn.now)
            if decode is not None:
                self._move(migration, offered, decode, plan, turn, cause=MoveCause.PLANNED)
                return True
            offered = Veto(MoveRefusal.TARGET_UNAVAILABLE, f"nobody could decode what {offered.instance} prefills")
        self._refuse_move(migration, offered, plan, turn)
        return False

    def hand_over(self, command: HandOverRequest, now: Seconds) -> list[LogEvent]:
        """A prefill is over at an instance that does not decode it: send it on, or refuse it where the load of those who
        decode no longer allows it. No events where it was handed over, or ended, before. Who was refused may ask again."""
        request = self.state.workload.requests.get(command.request)
        if request is None or request.instance != command.instance or request.attempt != command.attempt:
            return []
        if request.stage is not Stage.PREFILL and not request.awaits_decoder:
            return []
        chosen = self.policies.pairing.choose(
            self._seen, request, now, excluded=request.excluded, planned=request.decode
        )
        turn = _Turn(now)
        if isinstance(chosen, NoDecoder):
            self._refuse_hand_over(request, command, chosen, turn)
        else:
            self._send_on(request, command, chosen, turn)
        self._grant_next(command.instance, turn)
        return turn.events

    def drain(self, instance: InstanceId, reason: str, now: Seconds, *, leaving: bool) -> list[LogEvent]:
        """Place nothing there any more, and move what waits for it. No events where that is so already."""
        known = self.state.fleet.get(instance)
        if known is None or (known.draining and known.leaving == leaving):
            return []
        turn = _Turn(now)
        self._decide(
            turn,
            InstanceDraining(
                at=now, stamp=self._stamp, instance=instance, epoch=known.epoch, reason=reason, leaving=leaving
            ),
        )
        return turn.events + self.relocate_pending(now)

    def undrain(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        """Let an instance take requests again. No events where it does."""
        known = self.state.fleet.get(instance)
        if known is None or not known.draining:
            return []
        turn = _Turn(now)
        self._decide(turn, InstanceUndrained(at=now, stamp=self._stamp, instance=instance, epoch=known.epoch))
        return turn.events + self.relocate_pending(now)

    def place_held(self, now: Seconds) -> list[LogEvent]:
        """Place what waits for an instance to come, and refuse what has waited for as long as it may."""
        turn = _Turn(now)
        for request in list(self.state.workload.requests.values()):
            if request.stage is Stage.ARRIVED:
                self._place(request, request.attempt, request.excluded, turn, held=True)
                self._grant_next(request.instance, turn)
        return turn.events

    def relocate_pending(self, now: Seconds) -> list[LogEvent]:
        """Move requests that wait for an instance that takes none any more. Those without an alternative stay."""
        turn = _Turn(now)
        ready = self.state.fleet.ready
        for instance, line in list(self.state.workload.queues.items()):
            if instance in ready or not line.pending or not ready:
                continue
            for request in list(line.pending.values()):
                self._migrate(request, turn)
        for instance in ready:
            self._grant_next(instance, turn)
        return turn.events

    def check_liveness(
        self, now: Seconds, *, heard_since: Seconds, suspect_after: Seconds, leave_after: Seconds
    ) -> list[LogEvent]:
        """Suspect instances whose worker is silent, and let go of those silent for long.

        `heard_since`: silence before this moment does not count (the leader was not there to hear).
        """
        turn = _Turn(now)
        patience = LivenessTimeouts(heard_since=heard_since, suspect_after=suspect_after, leave_after=leave_after)
        for instance in self.state.fleet.instances:
            silent = now - max(instance.heard_at, heard_since)
            if silent > leave_after:
                self._let_go(instance, silent, patience, turn)
            elif silent > suspect_after and now > instance.excused_until and instance.status is not Status.SUSPECTED:
                self._suspect(instance, silent, patience, turn)
        return turn.events

    def eject_outliers(self, now: Seconds) -> list[LogEvent]:
        """Eject who fails requests or is far slower than the others, let who was ejected for long enough be tried again, and
        move what waits for who takes none any more."""
        turn = _Turn(now)
        while (found := self.policies.outliers.next(self.state, now)) is not None:
            name, epoch = found.instance.id, found.instance.epoch
            if isinstance(found, Ejection):
                event: LogEvent = InstanceEjected(
                    at=now,
                    stamp=self._stamp,
                    instance=name,
                    epoch=epoch,
                    cause=found.cause,
                    detail=found.detail,
                    seconds=found.seconds,
                    number=found.number,
                )
            else:
                event = InstanceUnejected(
                    at=now, stamp=self._stamp, instance=name, epoch=epoch, half_open=found.half_open
                )
            self._decide(turn, event)
        return turn.events + self.relocate_pending(now) if turn.events else []

    def _end_cancelled(
        self, request: Request, cause: CancelCause, reason: str, now: Seconds, *, sent_to: InstanceId
    ) -> list[LogEvent]:
        """Write the end and grant what it made room for. `sent_to`: the engine that has it, or NO_INSTANCE."""
        freed = request.instance
        turn = _Turn(now)
        self._decide(
            turn,
            RequestCancelled(
                at=now,
                stamp=self._stamp,
                request=request.id,
                reason=reason or cause.sentence,
                instance=sent_to,
                cause=cause,
            ),
        )
        self._grant_next(freed, turn)
        return turn.events

    def _suspect(self, instance: Instance, silent: Seconds, patience: LivenessTimeouts, turn: _Turn) -> None:
        self._decide(
            turn,
            InstanceSuspected(
                at=turn.now,
                stamp=self._stamp,
                instance=instance.id,
                epoch=instance.epoch,
                silent_seconds=silent,
                patience=patience,
            ),
        )

    def _let_go(self, instance: Instance, silent: Seconds, patience: LivenessTimeouts, turn: _Turn) -> None:
        reason = f"not heard of for {silent:.1f} s"
        self._decide(
            turn,
            InstanceLeft(
                at=turn.now,
                stamp=self._stamp,
                instance=instance.id,
                epoch=instance.epoch,
                reason=reason,
                patience=patience,
            ),
        )

    def _arrive(self, command: RouteRequest, turn: _Turn) -> Request:
        self._decide(
            turn,
            RequestArrived(
                at=turn.now,
                stamp=self._stamp,
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
                adapter=command.adapter,
                followed=command.followed,
                held_up=command.held_up,
                alias=command.alias,
                context_tokens=command.context_tokens,
            ),
        )
        return self.state.workload.requests[command.request]

    def _place(
        self, request: Request, attempt: int, excluded: Collection[InstanceId], turn: _Turn, *, held: bool
    ) -> None:
        """`held`: whether it was taken in before this turn."""
        lost = self._lost_seconds(request, attempt, turn.now, held=held)
        if lost:
            request = replace(request, slo_ttft=request.slo_ttft + lost)
        decoder = self._decoder_for(request, turn.now, excluded)
        view = self._view(request, turn.now, excluded, decoder)
        trial = self._trial(view)
        try:
            choice = trial or self.policies.routing.choose(view)
        except NoInstance as answer:
            if not self._may_hold(request, turn.now):
                retry_after = self._ready_in(turn.now)
                refusal = self._nobody_decodes(decoder, excluded) or Refusal(
                    RejectReason.NO_INSTANCE, str(answer), retry_after
                )
                self._reject(request, attempt, excluded, refusal, [], turn, decoder=decoder)
            return
        admitted = self._admit(view, choice, decoder, asked=trial is None)
        if isinstance(admitted, Refusal):
            self._reject(request, attempt, excluded, admitted, choice.considered, turn, decoder=decoder)
            return
        choice, pair = admitted
        option = choice.option
        self._decide(
            turn,
            RequestPlaced(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                instance=option.instance,
                hit_blocks=option.hit_blocks,
                uncached_tokens=option.uncached_tokens,
                queue_seconds=option.queue_seconds,
                prefill_seconds=option.work_seconds,
                predicted_ttft=_predicted_ttft(option, pair),
                policy=self.policies.routing.name,
                settings=self._settings,
                reason=choice.reason,
                candidates=[o.as_candidate() for o in choice.considered],
                attempt=attempt,
                excluded=list(excluded),
                decode=pair.decode,
                decode_reason=pair.reason,
                decode_candidates=pair.considered,
                transfer_seconds=pair.transfer_seconds,
                lost_seconds=lost,
            ),
        )

    def _trial(self, view: PoolView) -> Choice | None:
        """A half-open instance that nobody tries: the next request that it can serve goes there, whatever the policy would
        say, which has learned from a sick engine. Not one that has failed elsewhere."""
        if view.retried:
            return None
        for name in view.on_trial:
            if not self._is_taken(name):
                option = view.option(name)
                return Choice(option, f"{name} is tried again after its ejection", [option])
        return None

    def _is_taken(self, instance: InstanceId) -> bool:
        """Whether a half-open instance has its one request, or one that waits for it."""
        line = self.state.workload.queues.get(instance)
        return bool(line and line.pending) or self.state.has_trial_request(instance)

    def _lost_seconds(self, request: Request, attempt: int, now: Seconds, *, held: bool) -> Seconds:
        """What it lost where no instance was ready, or at an engine that failed it: no matter of load, so it is not to be
        refused for that."""
        if self.state.settings.fold_version < 3 or request.stage is Stage.PENDING:
            return 0.0
        if request.stage is Stage.ARRIVED:
            return max(0.0, now - request.arrived_at) if held or attempt > 1 else 0.0
        return max(0.0, now - request.granted_at)

    # Who decodes, where prefill and decode are split

    def _decoder_for(
        self, request: Request, now: Seconds, excluded: Collection[InstanceId], *, check: bool = True
    ) -> Decoder | NoDecoder | None:
        """Who would decode what another instance prefills; None where every instance does all of a request."""
        if not self._seen.fleet.split:
            return None
        return self.policies.pairing.choose(self._seen, request, now, excluded=excluded, check=check)

    def _view(
        self,
        request: Request,
        now: Seconds,
        excluded: Collection[InstanceId],
        decoder: Decoder | NoDecoder | None,
    ) -> PoolView:
        if decoder is None:
            return PoolView(self._seen, request, now, excluded=excluded)
        seconds = decoder.chosen.transfer_seconds if isinstance(decoder, Decoder) else None
        return PoolView(self._seen, request, now, excluded=excluded, transfer_seconds=seconds)

    def _nobody_decodes(self, decoder: Decoder | NoDecoder | None, excluded: Collection[InstanceId]) -> Refusal | None:
        """Why there is no place, if that is for want of who decodes."""
        if isinstance(decoder, NoDecoder) and any(i not in excluded for i in self._seen.fleet.ready):
            return decoder.refusal
        return None

    def _admit(
        self, view: PoolView, choice: Choice, decoder: Decoder | NoDecoder | None, *, asked: bool
    ) -> tuple[Choice, Pair] | Refusal:
        """`asked`: whether the admission policy is."""
        admitted = (self._refuse_full() or self.policies.admission.admit(view, choice)) if asked else choice
        if isinstance(admitted, Refusal):
            return admitted
        pair = ALONE if decoder is None else self._pair(view.request, admitted.option, decoder, view.now)
        return pair if isinstance(pair, Refusal) else (admitted, pair)

    def _pair(self, request: Request, option: Option, decoder: Decoder | NoDecoder, now: Seconds) -> Pair | Refusal:
        """Who decodes what this instance prefills: itself where it can and would be fast enough."""
        state, pairing = self._seen, self.policies.pairing
        instance = state.fleet[option.instance]
        if instance.role == "both":
            alone = weigh(state, instance, request, now, option.hit_blocks)
            if pairing.fast_enough(alone, request):
                return ALONE
        return decoder.refusal if isinstance(decoder, NoDecoder) else decoder.pair

    def _decode_after_move(self, request: Request, instance: InstanceId, now: Seconds) -> InstanceId | None:
        """Who decodes a request that moves to this instance, which has been admitted and is not refused any more.
        NO_INSTANCE where that instance does; None where nobody would."""
        if self.state.fleet[instance].role != "prefill":
            return NO_INSTANCE
        if request.decode:
            return request.decode
        decoder = self._decoder_for(request, now, request.excluded, check=False)
        return decoder.chosen.instance if isinstance(decoder, Decoder) else None

    def _refuse_hand_over(self, request: Request, command: HandOverRequest, nobody: NoDecoder, turn: _Turn) -> None:
        refusal = nobody.refusal
        self._decide(
            turn,
            HandOverRefused(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                source=command.instance,
                attempt=command.attempt,
                reason=refusal.reason.value,
                detail=refusal.detail,
                retry_after=refusal.retry_after,
                prefill=command.prefill,
                candidates=nobody.considered,
            ),
        )

    def _send_on(self, request: Request, command: HandOverRequest, decoder: Decoder, turn: _Turn) -> None:
        self._decide(
            turn,
            RequestHandedOver(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                source=command.instance,
                instance=decoder.chosen.instance,
                attempt=command.attempt,
                prefill=command.prefill,
                reason=decoder.reason,
                candidates=decoder.considered,
            ),
        )

    def _may_hold(self, request: Request, now: Seconds) -> bool:
        """Whether it may wait for an instance that is not there yet. What was sent to an engine before may not."""
        policies = self.policies
        if request.stage is not Stage.ARRIVED or request.excluded:
            return False
        if self._somebody_serves(request):
            return False
        if now - request.arrived_at >= policies.hold_seconds:
            return False
        held = sum(known.stage is Stage.ARRIVED for known in self.state.workload.requests.values())
        return held <= policies.hold_max

    def _somebody_serves(self, request: Request) -> bool:
        fleet = self.state.fleet
        able = fleet.ready_for(request)
        if not fleet.split or self.state.settings.fold_version < 3:
            return bool(able)
        decodes = any(fleet[instance].can_serve(request) for instance in fleet.decoders)
        return any(decodes or fleet[instance].role != "prefill" for instance in able)

    def _ready_in(self, now: Seconds) -> Seconds:
        """In how many engine seconds to ask again, after holding was in vain or too many are held. An instance that a scaler
        starts is expected to need as long again as it has been coming."""
        settings, hold = self.state.settings, self.policies.hold_seconds
        if not hold or settings.fold_version < 3:
            return 1.0
        decided = self.state.scaling.decided
        if decided is not None and decided.wanted > len(self.state.fleet.ready):
            return min(max(now - decided.at, COMING_WALL_SECONDS_MIN * settings.speed), hold)
        return min(ASK_AGAIN_WALL_SECONDS * settings.speed, hold)

    def _refuse_full(self) -> Refusal | None:
        waiting = sum(len(line.pending) for line in self.state.workload.queues.values())
        if waiting < self.policies.pending_max:
            return None
        return Refusal(RejectReason.QUEUE_FULL, f"{waiting} requests wait already", 1.0)

    def _reject(
        self,
        request: Request,
        attempt: int,
        excluded: Collection[InstanceId],
        refusal: Refusal,
        considered: list[Option],
        turn: _Turn,
        *,
        decoder: Decoder | NoDecoder | None = None,
    ) -> None:
        self._decide(
            turn,
            RequestRejected(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                reason=refusal.reason.value,
                detail=refusal.detail,
                retry_after=refusal.retry_after,
                policy=self.policies.routing.name,
                settings=self._settings,
                candidates=[o.as_candidate() for o in considered],
                attempt=attempt,
                excluded=list(excluded),
                decode_candidates=decoder.considered if decoder is not None else [],
            ),
        )

    def _migrate(self, request: Request, turn: _Turn) -> None:
        decoder = self._decoder_for(request, turn.now, request.excluded, check=False)
        seconds = None if isinstance(decoder, NoDecoder) and not request.decode else 0.0
        view = PoolView(self.state, request, turn.now, excluded=request.excluded, transfer_seconds=seconds)
        try:
            option = self.policies.routing.choose(view).option
        except NoInstance:
            return
        if option.instance == request.instance:
            return  # ejected, and nobody else can serve it
        decode = self._decode_after_move(request, option.instance, turn.now)
        if decode is not None:
            own = Migration(request.id, request.instance, option.instance, 0.0, relocated(request.instance))
            self._move(own, option, decode, NOT_PLANNED, turn, cause=MoveCause.RELOCATED)

    def _move(
        self,
        migration: Migration,
        option: Option,
        decode: InstanceId,
        plan: MigrationPlan,
        turn: _Turn,
        *,
        cause: MoveCause,
        wasted: Seconds = 0.0,
    ) -> None:
        self._decide(
            turn,
            RequestMigrated(
                at=turn.now,
                stamp=self._stamp,
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
                decode=decode,
                rebound=migration.rebind,
                wasted=wasted,
                cause=cause,
            ),
        )

    def _refuse_move(self, migration: Migration, objection: Veto, plan: MigrationPlan, turn: _Turn) -> None:
        self._decide(
            turn,
            MigrationRefused(
                at=turn.now,
                stamp=self._stamp,
                request=migration.request,
                source=migration.source,
                instance=migration.target,
                reason=objection.reason.value,
                detail=objection.detail,
                plan=plan.id,
                policy=plan.policy,
                planned_as_of=plan.as_of,
                benefit=migration.benefit,
                rebind=migration.rebind,
            ),
        )

    def _grant_next(self, instance_id: InstanceId, turn: _Turn) -> None:
        instance = self.state.fleet.get(instance_id)
        line = self.state.workload.queues.get(instance_id)
        if instance is None or line is None or instance.status not in GRANTED:
            return
        self._assume_prefills(instance_id, line, turn)
        while line.pending and not (
            instance_id in self.state.fleet.on_trial and self.state.has_trial_request(instance_id)
        ):
            request = self.policies.ordering.first(line, turn.now, self.state)
            if not self._has_room(line, request):
                return
            self._grant(request, turn)

    def _assume_prefills(self, instance: InstanceId, line: InstanceQueue, turn: _Turn) -> None:
        """Free the window of prefills that must be over by now, whose first token nobody will see: not streamed."""
        factor = self.state.latency.correction(instance)
        for request in list(line.prefill.values()):
            if request.decode:
                continue  # its ingress says when its prefill is over
            if not request.streaming and turn.now >= request.granted_at + request.engine_seconds * factor:
                self._assume_prefill(request, turn)

    def _assume_prefill(self, request: Request, turn: _Turn) -> None:
        self._decide(
            turn,
            PrefillFinished(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                instance=request.instance,
                ttft=turn.now - request.arrived_at,
                prefill=turn.now - request.granted_at,
            ),
        )

    def _grant(self, request: Request, turn: _Turn) -> None:
        self._decide(
            turn,
            RequestGranted(
                at=turn.now,
                stamp=self._stamp,
                request=request.id,
                instance=request.instance,
                attempt=request.attempt,
                rebind=self.policies.rebind and not request.rebound_from and not request.decode,
            ),
        )

    def _has_room(self, line: InstanceQueue, request: Request) -> bool:
        policies = self.policies
        return line.has_room(
            request.uncached_tokens, window_tokens=policies.prefill_window_tokens, running_max=policies.running_max
        )

    def _decide(self, turn: _Turn, decision: LogEvent) -> None:
        self.decided += 1
        if self._on_record is not None:
            decision = self._on_record(decision)
        self.state.apply(decision)
        turn.events.append(decision)

    @property
    def _stamp(self) -> Stamp:
        """Of the next decision."""
        return Stamp(term=self.term, number=self.decided + 1, as_of=self.state.sequence)


def _predicted_ttft(option: Option, pair: Pair) -> Seconds:
    if not pair.decode:
        return option.predicted_ttft
    return option.queue_seconds + option.prefill_seconds + pair.transfer_seconds


def _has_its_place(request: Request, attempt: int) -> bool:
    """Whether asking for this attempt is no news. A request that only arrived was taken in by an earlier leader."""
    return request.stage is not Stage.ARRIVED and (attempt <= request.attempt or _is_being_delivered(request))


def _is_being_delivered(request: Request) -> bool:
    """Whether the client has seen a part of the answer. One that is not streamed is only assumed to be decoding."""
    return request.stage is Stage.DECODING and request.streaming
