"""Rules of every kind of decision, whatever the policy."""

from collections import Counter
from collections.abc import Iterator
from math import isclose

from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.reasons import MoveRefusal
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled
from pointsman.primitives import EngineSeconds, Sequence
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.placement_rules import SAME, PlacementRules
from pointsman_lab.torture.pool_model import PoolModel
from pointsman_lab.torture.pool_records import ARRIVED, NO_INSTANCE, OVERDUE_SECONDS, PENDING, PREFILL, BookedRequest

PLAN_MOVES_MAX = 256
ROUND_MOVES_MAX = 64
REBOUND_MAX = 8
CLOCKS_APART_SECONDS: EngineSeconds = 5.0
SWITCH_SECONDS: EngineSeconds = 10.0


class DecisionRules(PlacementRules):
    def __init__(self, elected: LeaderElected, model: PoolModel) -> None:
        super().__init__(elected, model)
        self._moment: tuple[EngineSeconds, Sequence] = (0.0, 0)
        self._plans: dict[str, tuple[EngineSeconds, Sequence]] = {}
        self._moves: Counter[str] = Counter()

    def _problems(self, stored: Stored) -> Iterator[str]:
        match stored.event:
            case RequestArrived() as event:
                if event.request in self._model.requests or event.request in self._model.ended:
                    yield f"{event.request} was taken in before"
            case RequestPlaced() as event:
                yield from self._placed(event)
            case RequestRejected() as event:
                yield from self._rejected(event)
            case RequestGranted() as event:
                yield from self._granted(event)
            case RequestMigrated() as event:
                yield from self._plan(event)
                yield from self._rebound(event) if event.rebound else self._migrated(event)
            case MigrationRefused() as event:
                yield from self._plan(event)
                yield from self._move_refused(event)
            case RequestHandedOver() as event:
                yield from self._handed_over(event)
            case HandOverRefused() as event:
                yield from self._prefilled_at(event)
            case PrefillFinished() as event:
                yield from self._assumed(event)
            case RequestCancelled() as event:
                if event.request not in self._model.requests and event.request in self._model.ended:
                    yield f"{event.request} has ended before"
            case InstanceSuspected() as event:
                yield from self._silent(event, event.patience.suspect_after if event.patience else 0.0)
                suspect = self._model.instances.get(event.instance)
                if suspect is not None and suspect.suspected:
                    yield f"{event.instance} was suspected already"
                if suspect is not None and event.at <= suspect.excused_until:
                    yield f"{event.instance} has until {suspect.excused_until} to come back, and is suspected at {event.at}"
            case InstanceLeft() as event:
                yield from self._silent(event, event.patience.leave_after if event.patience else 0.0)
            case InstanceEjected() as event:
                if problem := self._wrong_epoch(event):
                    yield problem
                else:
                    yield from self._ejections.ejected(event, self._model.peers())
            case InstanceUnejected() as event:
                if problem := self._wrong_epoch(event):
                    yield problem
                else:
                    back = self._model.instances[event.instance]
                    yield from self._ejections.returned(event, ejected=back.ejected, half_open=back.half_open)
            case InstanceDraining() | InstanceUndrained() as event:
                known = self._model.instances.get(event.instance)
                if known is None or known.epoch != event.epoch:
                    yield f"{event.instance} has no epoch {event.epoch}"
                elif isinstance(event, InstanceUndrained) and not known.draining:
                    yield f"{event.instance} was not draining"
            case InstanceRoleChanged() as event:
                if problem := self._wrong_epoch(event) or self._wrong_change(event):
                    yield problem
            case _:
                pass

    def _wrong_change(self, event: InstanceRoleChanged) -> str:
        known = self._model.instances[event.instance]
        left = sum(
            request.instance == event.instance and request.stage != ARRIVED for request in self._model.requests.values()
        )
        if not known.draining and event.role == known.role != known.announced:
            return "" if not event.left else f"{event.instance} keeps its role, and none of its requests ends"
        if not known.becomes and event.role == known.announced != known.role:
            others = {i.becomes or i.role for i in self._model.instances.values() if not i.draining or i.becomes}
            unserved = len(others) == 1 and "both" not in others
            return "" if unserved else f"{event.instance} takes its role back, though there are {sorted(others)}"
        if known.becomes != event.role:
            return f"{event.instance} drains for {known.becomes!r}, not for {event.role}"
        if left != event.left:
            return f"{event.instance} has {left} requests, not {event.left}"
        if left and event.at < known.draining_since + SWITCH_SECONDS:
            return f"{event.instance} has {left} requests and drains for {event.at - known.draining_since} s only"
        return ""

    def _wrong_epoch(self, event: FleetEvent) -> str:
        known = self._model.instances.get(event.instance)
        return (
            "" if known is not None and known.epoch == event.epoch else f"{event.instance} has no epoch {event.epoch}"
        )

    def _plan(self, event: RequestMigrated | MigrationRefused) -> Iterator[str]:
        """A plan is carried out once, in one turn, with a bounded number of moves."""
        if not event.plan:
            return
        if self._plans.setdefault(event.plan, self._moment) != self._moment:
            yield f"plan {event.plan} was carried out before"
        rebind = event.rebound if isinstance(event, RequestMigrated) else event.rebind
        self._moves[event.plan] += 1
        self._moves[f"{event.plan} waiting"] += not rebind
        if self._moves[event.plan] > PLAN_MOVES_MAX or self._moves[f"{event.plan} waiting"] > ROUND_MOVES_MAX:
            yield f"plan {event.plan} has more moves than it may"

    def _migrated(self, event: RequestMigrated) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PENDING, event.source):
            yield f"{event.request} does not wait for {event.source}"
            return
        yield from self._moved(event, request)
        yield from self._pair(event.instance, event.decode, request, request.excluded)
        if event.plan and event.predicted_ttft > request.deadline - event.at + 1e-5:
            yield f"it would be late there: {event.predicted_ttft} s, {request.deadline - event.at} s are left"

    def _rebound(self, event: RequestMigrated) -> Iterator[str]:
        model = self._model
        request = model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PREFILL, event.source):
            yield f"{event.request} is not in the engine of {event.source}"
            return
        yield from self._moved(event, request)
        if not (self._bounds.rebind and request.rebind) or request.rebound_from:
            yield f"{event.request} may not be taken out of its engine (again)"
        if model.instances[event.instance].role != "both" or request.decode:
            yield f"{event.request} is split between two instances"
        if self._in_flight() >= REBOUND_MAX:
            yield f"{self._in_flight()} re-bound requests have no first token yet"
        if model.at(event.instance, PENDING) or not self._room(event.instance, event.uncached_tokens):
            yield f"{event.instance} could not begin it at once"
        overdue = event.at - request.granted_at
        overdue -= model.expected(event.source, request.engine_seconds, request.engine_tokens)
        overdue -= model.full_step(event.source)
        source = model.instances.get(event.source)
        answers = source is not None and source.status in ("ready", "draining")
        if overdue <= (OVERDUE_SECONDS if answers else 0.0):
            yield f"it is overdue by {overdue} s only"
        if not isclose(event.overdue, overdue, **SAME):
            yield f"it is overdue by {overdue} s, not {event.overdue}"

    def _moved(self, event: RequestMigrated, request: BookedRequest) -> Iterator[str]:
        model = self._model
        if event.source == event.instance:
            yield f"it moves from {event.source} to {event.instance}"
        yield from self._may_take(event.instance, request, request.excluded)
        if event.instance not in model.instances:
            return
        if problem := self._wrong_hit(event.hit_blocks, event.uncached_tokens, request, event.instance):
            yield f"{event.instance} is to have {problem}"
            return
        uncached = event.uncached_tokens
        work = model.prefill_cost(request.prompt_tokens, uncached, event.instance)
        if not isclose(event.prefill_seconds, work, **SAME):
            yield f"{event.prefill_seconds} s are booked for {uncached} tokens, which cost {work}"
        ttft = model.queued(event.instance, event.at) + model.expected_prefill(event.instance, work, uncached)
        if not event.plan:
            ttft += self._routing_waits(event.instance, request, event.at)
        if not isclose(event.predicted_ttft, ttft, **SAME):
            yield f"its first token is predicted in {event.predicted_ttft} s, not {ttft}"

    def _move_refused(self, event: MigrationRefused) -> Iterator[str]:
        model = self._model
        request = model.requests.get(event.request)
        stage = PREFILL if event.rebind else PENDING
        waits = request is not None and request.stage == stage
        if event.reason == MoveRefusal.NOT_WAITING:
            if waits:
                yield f"{event.request} is refused as not waiting, and waits at {request.instance if request else ''}"
            return
        if event.reason in (MoveRefusal.REBIND_OFF, MoveRefusal.REBOUND_BEFORE):
            if event.reason == MoveRefusal.REBIND_OFF and self._bounds.rebind:
                yield "re-binding is on"
            if event.reason == MoveRefusal.REBOUND_BEFORE and (request is None or not request.rebound_from):
                yield f"{event.request} was never re-bound"
            return
        if request is None or not waits:
            yield f"{event.request} is refused as {event.reason}, and does not wait"
            return
        there = event.instance in model.ready(request, request.excluded)
        if event.reason == MoveRefusal.ELSEWHERE and request.instance == event.source:
            yield f"{event.request} is at {event.source}"
        elif (
            event.reason == MoveRefusal.TARGET_UNAVAILABLE and there and model.instances[event.instance].role == "both"
        ):
            if event.instance != event.source and not model.on_trial(event.instance):
                yield f"{event.instance} takes {event.request}"
        elif (
            event.reason
            in (MoveRefusal.TARGET_LATE, MoveRefusal.TARGET_FULL, MoveRefusal.NO_GAIN, MoveRefusal.NOT_OVERDUE)
            and not there
        ):
            yield f"{event.instance} is weighed, and does not take {event.request}"
        elif event.reason == MoveRefusal.TOO_MANY_REBOUND and self._in_flight() < REBOUND_MAX:
            yield f"{self._in_flight()} are re-bound"
        elif event.reason == MoveRefusal.TARGET_LATE:
            uncached = model.uncached(
                request.prompt_tokens, model.hit_blocks(request.keys, event.instance), event.instance
            )
            work = model.prefill_cost(request.prompt_tokens, uncached, event.instance)
            ttft = model.queued(event.instance, event.at) + model.expected_prefill(event.instance, work, uncached)
            if ttft < request.deadline - event.at - 1e-6:
                yield f"it would be on time at {event.instance}: {ttft} s, {request.deadline - event.at} s are left"

    def _handed_over(self, event: RequestHandedOver) -> Iterator[str]:
        yield from self._prefilled_at(event)
        request, known = self._model.requests.get(event.request), self._model.instances.get(event.instance)
        if known is None or event.instance not in self._model.decoders():
            yield f"{event.instance} takes nothing to decode"
        elif request is not None and (event.instance in request.excluded or not known.serves(request)):
            yield f"{event.instance} does not serve {event.request}"

    def _prefilled_at(self, event: RequestHandedOver | HandOverRefused) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None or (request.instance, request.attempt) != (event.source, event.attempt):
            yield f"{event.request} is not at {event.source}"
        elif request.stage != PREFILL and not request.awaits_decoder:
            yield f"{event.request} is {request.stage}"

    def _assumed(self, event: PrefillFinished) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PREFILL, event.instance):
            yield f"{event.request} is not in prefill at {event.instance}"
            return
        if request.streaming:
            return  # its ingress told (`told_first_tokens_had_come`)
        learned = self._model.learned.get(event.instance)
        due = request.granted_at + request.engine_seconds * (learned.factor if learned is not None else 1.0)
        if request.decode or event.at < due - 1e-6:
            yield f"its first token is assumed at {event.at}, due at {due}"

    def _silent(self, event: InstanceSuspected | InstanceLeft, after: EngineSeconds) -> Iterator[str]:
        known = self._model.instances.get(event.instance)
        if known is None or known.epoch != event.epoch:
            yield f"{event.instance} has no epoch {event.epoch}"
        elif event.patience is not None:
            heard_at = known.heard_at if known.heard_at <= event.at + CLOCKS_APART_SECONDS else 0.0
            silent = event.at - max(heard_at, event.patience.heard_since)
            if silent <= after:
                yield f"{event.instance} was silent for {silent} s, not {after}"

    def _in_flight(self) -> int:
        return sum(r.rebound_from != NO_INSTANCE and r.stage == PREFILL for r in self._model.requests.values())
