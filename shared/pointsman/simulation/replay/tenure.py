"""Recomputes one term: the production Dispatcher makes each decision again, on the state that its leader had. In: the
entries behind the LeaderElected; out: counts and differences in a `Verdict`. Calls are derived from the recorded
decisions; requests come from the log, everything else is recomputed. The recorded decision is applied, so that one
difference does not cause the next."""

from collections import deque

import msgspec

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.commands import HandOverRequest, RouteRequest, SentRequest
from pointsman.contracts.decisions import (
    HandOverRefused,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.reasons import MoveCause
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled, RequestEvent
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import rivals_of
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.ports import LogEntry
from pointsman.primitives import NO_SECONDS, InstanceId, RequestId, Sequence
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder, Step
from pointsman.simulation.replay.verdict import Difference, Recomputed, TermSummary, Verdict, Watch, inputs_of
from pointsman.state.state import State
from pointsman.state.workload import NO_INSTANCE, Request

_WITH_SETTINGS = (RequestPlaced, RequestRejected)
_ANSWERS = (RequestPlaced, RequestRejected, RequestHandedOver, HandOverRefused)


class _NotWrittenError(Exception):
    """Raised where the log lacks what the Dispatcher decided; ends the call."""


class Tenure:
    """The leader's state, and its decisions in the order of their numbers."""

    def __init__(
        self,
        state: State,
        policies: PolicySet,
        summary: TermSummary,
        verdict: Verdict,
        watch: Watch | None,
    ) -> None:
        self._state = state
        self._term = summary.term
        self._summary = summary
        self._verdict = verdict
        self._watch = watch
        self._dispatcher = Dispatcher(state, policies, term=summary.term, on_decision=self._compare)
        self._order: LeaderOrder[LogEntry] = LeaderOrder(summary.term)
        self._moment: tuple[float, Sequence] = (0.0, 0)
        self._recorded: deque[tuple[LogEntry, LogEvent]] = deque()
        self._ends = False
        self._is_cut = False

    def feed(self, entry: LogEntry) -> None:
        stamp = entry.event.stamp if entry.event is not None else None
        if stamp is not None and stamp.term == self._term:
            self._summary.decisions = max(self._summary.decisions, stamp.number)
        for step in self._order.feed(entry):
            self._take(step)

    def close(self) -> None:
        self._ends = True
        self._judge_moment()
        for step in self._order.finish():
            self._take(step)
        self._verdict.unapplied = max(self._verdict.unapplied, self._state.dead_letters.unapplied)

    def _take(self, step: Step[LogEntry]) -> None:
        entry, event = step.entry, step.entry.event
        if step.kind is Kind.READ:
            self._judge_moment()
            self._order.apply(step, self._state)
            return
        assert event is not None
        assert event.stamp is not None
        if step.kind is Kind.DECIDED:
            moment = (event.at, event.stamp.as_of)
            if moment != self._moment:
                self._judge_moment()
                self._moment = moment
            self._recorded.append((entry, event))
        elif step.kind is Kind.LOST:
            self._skip(event)
        elif not isinstance(event, RequestArrived):
            self._verdict.decisions -= 1  # written twice

    def _skip(self, event: LogEvent) -> None:
        """Decisions before the hole are judged, later ones are not."""
        hole = self._order.hole
        if not self._is_cut:
            self._is_cut = self._ends = True
            self._judge_moment()
            self._verdict.problems.append(hole)
        if not isinstance(event, RequestArrived):
            self._verdict.unchecked[f"{hole}: nothing behind them in that term can be recomputed"] += 1

    def _judge_moment(self) -> None:
        unjudged = self._recorded
        while unjudged:
            entry, event = unjudged[0]
            assert event.stamp is not None
            self._dispatcher.decided = event.stamp.number - 1
            try:
                self._recompute(event)
            except _NotWrittenError:
                pass
            except Exception as error:  # noqa: BLE001 - the leader's command failed so too, after what it had decided
                self._verdict.failed[short_reason(f"{type(error).__name__}: {error}")] += 1
            if unjudged and unjudged[0][1] is event:
                self._differ(entry, event, None)
                self._state.apply(event)
                unjudged.popleft()

    def _recompute(self, event: LogEvent) -> None:
        """Repeat the call that led to this decision; `_compare` gets all its decisions."""
        dispatcher, now = self._dispatcher, event.at
        dispatcher.recording.rivals = rivals_of(event)
        match event:
            case RequestArrived():
                dispatcher.recording.rivals = rivals_of(self._answer_to(event.request))
                dispatcher.route(self._command(event), now)
            case RequestHandedOver() | HandOverRefused():
                command = HandOverRequest(
                    request=event.request, attempt=event.attempt, instance=event.source, prefill=event.prefill
                )
                dispatcher.hand_over(command, now)
            case RequestPlaced() | RequestRejected():
                displaced_by = event.displaced_by if isinstance(event, RequestRejected) else None
                answer = self._answer_to(displaced_by) if displaced_by else event
                dispatcher.recording.rivals = rivals_of(answer)
                known = self._state.workload.requests.get(answer.request) if answer is not None else None
                if known is not None and answer is not None:
                    dispatcher.route(_repeated_command(known, answer), now)
            case TenantPoliciesSet():
                dispatcher.set_tenant_policies(event.policies, now, by=event.by)
            case PrefillFinished() if (told := self._told(event)) is not None:
                dispatcher.note_first_token(told, now)
            case RequestGranted() | PrefillFinished():
                dispatcher.grant_next(event.instance, now)
            case RequestCancelled():
                end = dispatcher.cancel_ungranted if event.instance == NO_INSTANCE else dispatcher.cancel_any
                end(event.request, event.cause, now, reason=event.reason)
            case RequestMigrated(cause=MoveCause.RELOCATED):
                dispatcher.relocate_pending(now)
            case RequestMigrated() | MigrationRefused():
                dispatcher.migrate(self._plan(event), now)
            case InstanceSuspected() | InstanceLeft() if event.patience is not None:
                others = {i.id: now for i in self._state.fleet.instances if i.id != event.instance}
                dispatcher.check_liveness(event.patience, now, others)  # it has no evidence of others
            case InstanceLeft() if event.refused:
                dispatcher.refuse(event.instance, event.reason, now)
            case InstanceDraining() if self._is_repeat(event):
                dispatcher.repeat_roles_and_drains([event.instance], now)
            case InstanceDraining():
                dispatcher.drain(
                    event.instance, event.reason, now, leaving=event.leaving, by=event.by, becomes=event.becomes
                )
            case InstanceRoleChanged():
                known_instance = self._state.fleet.get(event.instance)
                if known_instance is not None and (known_instance.becomes or event.role != known_instance.role):
                    dispatcher.change_roles(now)
                else:
                    dispatcher.repeat_roles_and_drains([event.instance], now)
            case InstanceUndrained():
                dispatcher.undrain(event.instance, now, by=event.by)
            case ApiKeyChanged():
                dispatcher.record_key(event.key, event.tenant, event.action, now, by=event.by)
            case InstanceEjected() | InstanceUnejected():
                dispatcher.eject_outliers(now)
            case _:
                self._take_as_given(event)

    def _command(self, arrived: RequestArrived) -> RouteRequest:
        attempt, excluded = 1, list[InstanceId]()
        answer = self._answer_to(arrived.request)
        if answer is not None:
            attempt, excluded = answer.attempt, answer.excluded
        command = msgspec.convert(arrived, RouteRequest, from_attributes=True)
        return msgspec.structs.replace(command, attempt=attempt, excluded=excluded)

    def _answer_to(self, request: RequestId) -> RequestPlaced | RequestRejected | None:
        """Another request may have had to make room for it first."""
        for _, event in self._recorded:
            if isinstance(event, RequestPlaced | RequestRejected) and event.request == request:
                return event
        return None

    def _is_repeat(self, event: InstanceDraining) -> bool:
        known = self._state.fleet.get(event.instance)
        return known is not None and known.drains_so(leaving=event.leaving, becomes=event.becomes)

    def _told(self, event: PrefillFinished) -> SentRequest | None:
        """By its ingress; None: its leader assumed it."""
        known = self._state.workload.requests.get(event.request)
        if known is None or not known.streaming:
            return None
        return SentRequest(request=event.request, attempt=known.attempt, instance=event.instance)

    def _plan(self, first: RequestMigrated | MigrationRefused) -> MigrationPlan:
        moves: list[Migration] = []
        for _, event in self._recorded:
            if isinstance(event, RequestGranted) and moves and moves[-1].rebind and moves[-1].request == event.request:
                continue  # granted at once after its re-binding
            if not isinstance(event, RequestMigrated | MigrationRefused) or event.plan != first.plan:
                break
            if isinstance(event, RequestMigrated) and event.cause is MoveCause.RELOCATED:
                break
            rebind = event.rebound if isinstance(event, RequestMigrated) else event.rebind
            moves.append(Migration(event.request, event.source, event.instance, event.benefit, event.reason, rebind))
        return MigrationPlan(first.planned_as_of, tuple(moves), first.plan, first.policy)

    def _take_as_given(self, event: LogEvent) -> None:
        self._verdict.unchecked[f"{type(event).__name__} does not say what it was decided from"] += 1
        self._state.apply(event)
        self._recorded.popleft()

    def _compare(self, recomputed: LogEvent) -> LogEvent:
        """Returns the recorded decision in place of this one. Raises _NotWrittenError if there is none."""
        unjudged = self._recorded
        if not unjudged or not _same_subject(unjudged[0][1], recomputed):
            if unjudged or not self._ends:
                self._differ(None, None, recomputed)
            raise _NotWrittenError
        entry, recorded = unjudged[0]
        recomputed = _as_recorded_then(recorded, recomputed)
        if self._watch is not None:
            self._watch(Recomputed(entry.sequence, recorded, recomputed, self._state))
        if recorded != recomputed:
            self._differ(entry, recorded, recomputed)
        elif not isinstance(recorded, RequestArrived):
            self._verdict.identical += 1
        unjudged.popleft()
        return recorded

    def _differ(self, entry: LogEntry | None, recorded: LogEvent | None, recomputed: LogEvent | None) -> None:
        event = recorded or recomputed
        assert event is not None
        assert event.stamp is not None
        self._verdict.add(
            Difference(
                sequence=entry.sequence if entry else 0,
                term=self._term,
                number=event.stamp.number,
                recorded=recorded,
                recomputed=recomputed,
                known=inputs_of(self._state, event),
            )
        )


def _as_recorded_then(recorded: LogEvent, recomputed: LogEvent) -> LogEvent:
    """Settings that were not recorded are those of the term, as the recomputed ones are. Earlier releases did not record
    by how much a redispatched request was overdue, and recorded all keys of requests over a limit."""
    if isinstance(recorded, RequestArrived) and isinstance(recomputed, RequestArrived):
        fewer = len(recomputed.keys) < len(recorded.keys) and recorded.keys.startswith(recomputed.keys)
        return msgspec.structs.replace(recomputed, keys=recorded.keys) if fewer else recomputed
    if isinstance(recorded, RequestMigrated) and isinstance(recomputed, RequestMigrated) and not recorded.overdue:
        return msgspec.structs.replace(recomputed, overdue=NO_SECONDS)
    if isinstance(recorded, _WITH_SETTINGS) and isinstance(recomputed, _WITH_SETTINGS) and not recorded.settings:
        return msgspec.structs.replace(recomputed, settings={})
    return recomputed


def _repeated_command(request: Request, answer: RequestPlaced | RequestRejected) -> RouteRequest:
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
        attempt=answer.attempt,
        excluded=list(answer.excluded),
        answers=request.answers,
    )


def _same_subject(recorded: LogEvent, recomputed: LogEvent) -> bool:
    if isinstance(recorded, _ANSWERS) and isinstance(recomputed, _ANSWERS):
        return recorded.request == recomputed.request
    if type(recorded) is not type(recomputed):
        return False
    if isinstance(recorded, RequestGranted) and isinstance(recomputed, RequestGranted):
        return recorded.instance == recomputed.instance
    if isinstance(recorded, RequestEvent) and isinstance(recomputed, RequestEvent):
        return recorded.request == recomputed.request
    return getattr(recorded, "instance", None) == getattr(recomputed, "instance", None)
