"""The decisions of each term, judged by rules of their own.

In comes the history of a log. Each leader's order is made anew: the log up to its election, then its decisions by their
numbers, before each of them whatever else it had applied by then (`as_of`). Before each decision the model of the pool
(`pool_model`) says what was known; a rule for that kind of decision says what is wrong with it. After each turn, nothing may
wait at an engine that has room. Nothing here asks `pointsman.policies`: which instance a policy should prefer is not judged,
only what holds for all of them. A term is judged up to the first decision that the log lacks,
or that was made on entries which the log has lost.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import isclose

from pointsman.contracts.decisions import (
    Candidate,
    HandOverRefused,
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.reasons import MoveRefusal, RejectReason
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled, RequestEvent
from pointsman.primitives import InstanceId, Seconds, Sequence, Tokens
from pointsman_lab.torture.ejections import EjectionRules
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.pool_model import ARRIVED, NOBODY, PENDING, PREFILL, BookedRequest, PoolModel

PLAN_MOVES_MAX = 256
ROUND_MOVES_MAX = 64
HOLD_MAX = 1000
REBOUND_MAX = 8
OVERDUE_SECONDS: Seconds = 3.0
RETURN_SECONDS_MAX: Seconds = 4.0
"""Virtual seconds within which a leader that decides anything lets in who was ejected for long enough."""
PASSED_SECONDS_MAX: Seconds = 1.0
"""As much of the time between two of its decisions counts: it may have stood still."""
AGEING = 0.05
"""Of `shortest_prefill`: prefill seconds for which a second of age counts."""
SAME = {"rel_tol": 1e-6, "abs_tol": 1e-6}

LATE = (RejectReason.SLO_TTFT, RejectReason.SLO_UNREACHABLE)


def audit(
    history: list[Stored], new_model: Callable[[], PoolModel], *, lapses: Collection[tuple[str, Sequence]] = ()
) -> Iterator[str]:
    """What is wrong with the decisions of all terms in a log. `lapses`: entries that a scheduler, by its name, read while it did
    not lead, or could not be sure of its lease."""
    decisions: dict[int, dict[int, Stored]] = defaultdict(dict)
    for stored in history:
        if stored.stamp is not None and not stored.echo:
            decisions[stored.stamp.term].setdefault(stored.stamp.number, stored)
    for stored in history:
        if isinstance(stored.event, LeaderElected) and not stored.echo:
            model = new_model()
            for before in history[: stored.sequence]:
                model.apply(before.event, before.sequence)
            term = _Term(stored.event, model, history, lapses)
            yield from term.judge(decisions[stored.event.term])


@dataclass(slots=True)
class _Bounds:
    """What a leader was told."""

    window_tokens: Tokens
    running_max: int
    pending_max: int
    ordering: str
    admission: str
    rebind: bool
    ageing: float
    hold_seconds: Seconds
    hold_max: int

    @classmethod
    def told(cls, settings: Settings) -> "_Bounds":
        return cls(
            window_tokens=int(settings["prefill_window_tokens"]),
            running_max=int(settings["running_max"]),
            pending_max=int(settings["pending_max"]),
            ordering=str(settings["ordering"]),
            admission=str(settings["admission"]),
            rebind=bool(settings.get("rebind", False)),
            ageing=float(settings.get("order.ageing", AGEING)),
            hold_seconds=float(settings.get("hold_seconds", 0.0)),
            hold_max=int(settings.get("hold_max", HOLD_MAX)),
        )


class _Term:
    """One leader's decisions in the order in which it made them."""

    def __init__(
        self,
        elected: LeaderElected,
        model: PoolModel,
        history: list[Stored],
        lapses: Collection[tuple[str, Sequence]],
    ) -> None:
        self._term = elected.term
        self._leader = elected.scheduler
        self._lapses = lapses
        self._stall_counts = elected.policy == "dualmap"
        """Whether a queue was weighed with the time for which its engine has been stalled."""
        self._bounds = _Bounds.told(elected.settings)
        self._model = model
        self._ejections = EjectionRules(elected.settings, model.conducts, model.speed)
        self._overdue: dict[InstanceId, Seconds] = {}
        """For how long this leader has gone on to decide since an ejection was over, in virtual seconds."""
        self._decided_at: Seconds = 0.0
        self._history = history
        self._applied = model.sequence
        self._touched: dict[InstanceId, None] = {}
        """Instances where the present turn has placed, freed or granted something."""
        self._moment: tuple[Seconds, Sequence] = (0.0, 0)
        self._plans: dict[str, tuple[Seconds, Sequence]] = {}
        self._moves: Counter[str] = Counter()

    def judge(self, decisions: dict[int, Stored]) -> Iterator[str]:
        number = 1
        while number in decisions:
            stored = decisions[number]
            event, stamp = stored.event, stored.stamp
            assert event is not None
            assert stamp is not None
            if stamp.as_of >= stored.sequence:
                return  # it was made on what the log has lost
            if (event.at, stamp.as_of) != self._moment:
                yield from self._conclude_turn(f"before decision {number} of term {self._term}")
                self._moment = (event.at, stamp.as_of)
            yield from self._advance(stamp.as_of)
            for problem in (*self._problems(stored), *self._overdue_returns(stored)):
                yield f"{type(event).__name__} at {stored.sequence}, {number} of term {self._term}: {problem}"
            self._touch(event)
            self._model.apply(event)
            self._touch(event)
            number += 1

    def _advance(self, as_of: Sequence) -> Iterator[str]:
        """Whatever the leader had read in the log by then. It grants at once what an entry made room for."""
        while self._applied < as_of:
            yield from self._conclude_turn(f"behind entry {self._applied}, before decisions of term {self._term}")
            stored = self._history[self._applied]
            self._applied += 1
            if stored.stamp is None or stored.stamp.term != self._term:
                if (self._leader, stored.sequence) not in self._lapses:
                    self._touch(stored.event)
                self._model.apply(stored.event, stored.sequence)

    def _touch(self, event: object) -> None:
        """A turn looks at the instance where the request of its decision is, and at the one where it was."""
        if isinstance(event, RequestEvent):
            request = self._model.requests.get(event.request)
            if request is not None and request.instance and request.stage != ARRIVED:
                self._touched[request.instance] = None

    def _conclude_turn(self, when: str) -> Iterator[str]:
        """Nothing that comes first in its line waits for an engine that has room for it."""
        for instance in self._touched:
            first, known = self._first(instance), self._model.instances.get(instance)
            waits = first is not None and known is not None and known.status in ("ready", "draining")
            if waits and first is not None and not self._model.on_trial(instance) and self._fits(first):
                yield f"{when}: {first.id} waits for {instance}, which has room for its {first.uncached} tokens"
        self._touched.clear()

    # Rules, one for each kind of decision

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
                if known_life := self._life(event):
                    yield known_life
                else:
                    yield from self._ejections.ejected(event, self._model.peers())
            case InstanceUnejected() as event:
                if known_life := self._life(event):
                    yield known_life
                else:
                    back = self._model.instances[event.instance]
                    yield from self._ejections.returned(event, ejected=back.ejected, half_open=back.half_open)
            case InstanceDraining() | InstanceUndrained() as event:
                known = self._model.instances.get(event.instance)
                if known is None or known.epoch != event.epoch:
                    yield f"{event.instance} has no life {event.epoch}"
                elif isinstance(event, InstanceUndrained) and not known.draining:
                    yield f"{event.instance} was not draining"
            case _:
                pass

    def _life(self, event: FleetEvent) -> str:
        """What is wrong with whom it is about, or nothing."""
        known = self._model.instances.get(event.instance)
        return "" if known is not None and known.epoch == event.epoch else f"{event.instance} has no life {event.epoch}"

    def _overdue_returns(self, stored: Stored) -> Iterator[str]:
        """Who was ejected for long enough is let in again: nobody decides anything else for seconds on end."""
        passed, self._decided_at = sorted((0.0, stored.at - self._decided_at, PASSED_SECONDS_MAX))[1], stored.at
        assert stored.event is not None
        for name, known in self._model.instances.items():
            if not known.ejected or self._ejections.overdue(name, stored.event.at) <= 0:
                self._overdue.pop(name, None)
                continue
            self._overdue[name] = self._overdue.get(name, 0.0) + passed
            if self._overdue[name] > RETURN_SECONDS_MAX and not isinstance(stored.event, InstanceUnejected):
                yield f"{name} is still ejected, {self._overdue[name]:.1f} s after its ejection was over"

    def _placed(self, event: RequestPlaced) -> Iterator[str]:
        model = self._model
        request = model.requests.get(event.request)
        if request is None:
            yield f"{event.request} is not under way"
            return
        if request.stage != ARRIVED and event.attempt <= request.attempt:
            yield f"{event.request} has its place for attempt {request.attempt}"
        if missing := set(request.excluded).difference(event.excluded):
            yield f"{event.request} may go to {sorted(missing)} again, which failed it before"
        yield from self._may_take(event.instance, request, tuple(event.excluded))
        if not self._full_line_allows():
            yield "the line is full"
        yield from self._candidates(event.candidates, request, event.at, tuple(event.excluded))
        if event.instance not in model.instances:
            return
        own = next((c for c in event.candidates if c.instance == event.instance), None)
        if own is None or (event.hit_blocks, event.uncached_tokens) != (own.hit_blocks, own.uncached_tokens):
            yield f"{event.instance} offers {own}, not {event.hit_blocks} blocks, {event.uncached_tokens} tokens to compute"
            return
        work = model.prefill_cost(request.prompt_tokens, event.uncached_tokens, event.instance)
        if not isclose(event.prefill_seconds, work, **SAME):
            yield f"{event.prefill_seconds} s are booked for {event.uncached_tokens} tokens, which cost {work}"
        if not isclose(event.queue_seconds, own.queue_seconds, **SAME):
            yield f"the queue is {event.queue_seconds} s, and was weighed as {own.queue_seconds}"
        transfer = event.transfer_seconds if event.decode else 0.0
        if not isclose(event.predicted_ttft, own.queue_seconds + own.prefill_seconds + transfer, **SAME):
            yield f"its first token is predicted in {event.predicted_ttft} s, which is not the sum of its parts"
        lost = request.lost(event.attempt, event.at)
        if not isclose(event.lost_seconds, lost, **SAME):
            yield f"it is said to have lost {event.lost_seconds} s, not {lost}"
        budget = request.deadline + lost - event.at
        tries = model.on_trial(event.instance)
        others = [i for i in model.ready(request, tuple(event.excluded)) if not model.on_trial(i)]
        if tries and others and (model.tried_by(event.instance) or model.at(event.instance, PENDING)):
            yield f"{event.instance} is half-open, and tried by another already"
        if self._bounds.admission != "none" and own.predicted_ttft > budget + 1e-6 and not tries:
            yield f"its first token is predicted in {own.predicted_ttft} s, {budget} s are left"
        yield from self._pair(event.instance, event.decode, request, tuple(event.excluded))

    def _rejected(self, event: RequestRejected) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None:
            yield f"{event.request} is not under way"
            return
        excluded = tuple(event.excluded)
        yield from self._candidates(event.candidates, request, event.at, excluded)
        lost = request.lost(event.attempt, event.at)
        budget = request.deadline + lost - event.at
        able = self._model.ready(request, excluded)
        if event.reason in LATE:
            late = [c for c in event.candidates if c.predicted_ttft > budget]
            if self._bounds.admission == "none":
                yield "it is refused as late, and all are admitted"
            elif self._bounds.admission == "predicted_ttft" and not late:
                yield f"it is refused as late, and would be on time everywhere: {budget} s are left"
            elif self._bounds.admission != "predicted_ttft" and len(late) < len(event.candidates):
                yield f"it is refused as late, and would be on time somewhere: {budget} s are left"
            if event.reason == RejectReason.SLO_UNREACHABLE and any(
                c.prefill_seconds <= request.slo_ttft + lost for c in event.candidates
            ):
                yield f"its objective of {request.slo_ttft + lost} s is called out of reach, and is not"
        elif event.reason == RejectReason.QUEUE_FULL and self._full_line_allows():
            yield f"the line is called full with {self._waiting()} of {self._bounds.pending_max}"
        elif event.reason == RejectReason.NO_INSTANCE and any(self._model.instances[i].role == "both" for i in able):
            yield f"nobody is said to take it, and {able} would"
        elif (
            event.reason == RejectReason.NO_INSTANCE
            and not able
            and not excluded
            and self._would_be_held(request, event.at)
        ):
            yield f"nobody takes it, and it is not held, {event.at - request.arrived_at:.2f} s after it came"

    def _granted(self, event: RequestGranted) -> Iterator[str]:
        request = self._model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PENDING, event.instance):
            yield f"{event.request} does not wait for {event.instance}"
            return
        known = self._model.instances.get(event.instance)
        status = known.status if known is not None else "gone"
        elsewhere = self._model.ready(request, request.excluded)
        stays = status in ("draining", "ejected") and not elsewhere
        if status != "ready" and event.instance not in elsewhere and not stays:
            yield f"{event.instance} is {status}; {elsewhere} would take {event.request}"
        if event.instance in request.excluded:
            yield f"{event.instance} has failed {event.request} before"
        if self._model.on_trial(event.instance) and (others := self._model.tried_by(event.instance)):
            yield f"{event.instance} is half-open, and tried by {[other.id for other in others]} already"
        if event.attempt != request.attempt:
            yield f"{event.request} is at attempt {request.attempt}, not {event.attempt}"
        if not self._fits(request):
            inside = [
                (r.id, r.uncached, r.stage) for r in self._model.requests.values() if r.instance == event.instance
            ]
            yield f"{event.instance} has no room for {request.uncached} tokens beside {inside} ({self._bounds})"
        first = self._first(event.instance)
        if first is not None and first is not request and not request.rebound_from:
            yield f"{first.id} comes before {event.request} at {event.instance}"
        may = self._bounds.rebind and not request.rebound_from and not request.decode
        if event.rebind != may:
            yield f"its ingress is {'' if event.rebind else 'not '}to ask whether it goes elsewhere"

    def _plan(self, event: RequestMigrated | MigrationRefused) -> Iterator[str]:
        """A plan is carried out once, in one turn, and has at most so many moves."""
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
        if self._under_way() >= REBOUND_MAX:
            yield f"{self._under_way()} re-bound requests have no first token yet"
        if model.at(event.instance, PENDING) or not self._room(event.instance, event.uncached_tokens):
            yield f"{event.instance} could not begin it at once"
        overdue = event.at - request.granted_at
        overdue -= model.expected(event.source, request.engine_seconds, request.engine_tokens)
        source = model.instances.get(event.source)
        answers = source is not None and source.status in ("ready", "draining")
        if overdue <= (OVERDUE_SECONDS if answers else 0.0):
            yield f"it is overdue by {overdue} s only"

    def _moved(self, event: RequestMigrated, request: BookedRequest) -> Iterator[str]:
        """What holds for either kind of move."""
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
        ttft = model.queued(event.instance, event.at) + model.expected(event.instance, work, uncached)
        if self._stall_counts and not event.plan:
            ttft += model.stalled(event.instance, event.at)
        if not isclose(event.predicted_ttft, ttft, **SAME):
            yield f"its first token is predicted in {event.predicted_ttft} s, not {ttft}"

    def _move_refused(self, event: MigrationRefused) -> Iterator[str]:
        """Why a move was not made must be so."""
        model = self._model
        request = model.requests.get(event.request)
        stage = PREFILL if event.rebind else PENDING
        waits = request is not None and request.stage == stage
        if event.reason == MoveRefusal.NOT_WAITING:
            if waits:
                yield f"{event.request} is said not to wait, and does, at {request.instance if request else ''}"
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
            if event.instance != event.source:
                yield f"{event.instance} takes {event.request}"
        elif (
            event.reason
            in (MoveRefusal.TARGET_LATE, MoveRefusal.TARGET_FULL, MoveRefusal.NO_GAIN, MoveRefusal.NOT_OVERDUE)
            and not there
        ):
            yield f"{event.instance} is weighed, and does not take {event.request}"
        elif event.reason == MoveRefusal.TOO_MANY_REBOUND and self._under_way() < REBOUND_MAX:
            yield f"{self._under_way()} are re-bound"
        elif event.reason == MoveRefusal.TARGET_LATE:
            uncached = model.uncached(
                request.prompt_tokens, model.hit_blocks(request.keys, event.instance), event.instance
            )
            work = model.prefill_cost(request.prompt_tokens, uncached, event.instance)
            ttft = model.queued(event.instance, event.at) + model.expected(event.instance, work, uncached)
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
        elif request.stage != PREFILL and not request.with_nobody:
            yield f"{event.request} is {request.stage}"

    def _assumed(self, event: PrefillFinished) -> Iterator[str]:
        """A first token that nobody can see comes when it is predicted."""
        request = self._model.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (PREFILL, event.instance):
            yield f"{event.request} is not in prefill at {event.instance}"
            return
        learned = self._model.learned.get(event.instance)
        due = request.granted_at + request.engine_seconds * (learned.factor if learned is not None else 1.0)
        if request.streaming or request.decode or event.at < due - 1e-6:
            yield f"its first token is assumed at {event.at}, due at {due}"

    def _silent(self, event: InstanceSuspected | InstanceLeft, after: Seconds) -> Iterator[str]:
        known = self._model.instances.get(event.instance)
        if known is None or known.epoch != event.epoch:
            yield f"{event.instance} has no life {event.epoch}"
        elif event.patience is not None:
            silent = event.at - max(known.heard_at, event.patience.heard_since)
            if silent <= after:
                yield f"{event.instance} was silent for {silent} s, not {after}"

    # What several of them ask

    def _may_take(
        self, instance: InstanceId, request: BookedRequest, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        known = self._model.instances.get(instance)
        if instance not in self._model.ready(request, excluded):
            why = "left" if known is None else f"{known.status}, {known.role}, {sorted(known.adapters)}"
            yield f"{instance} does not take {request.id} ({why}; excluded: {excluded})"

    def _pair(
        self, instance: InstanceId, decode: InstanceId, request: BookedRequest, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        """Who only prefills needs somebody else who decodes."""
        known = self._model.instances.get(instance)
        if known is not None and known.role == "prefill" and decode == NOBODY:
            yield f"{instance} only prefills, and nobody decodes"
        takes = decode in self._model.decoders() and decode not in excluded
        if decode not in (NOBODY, request.decode) and not takes:
            yield f"{decode} decodes nothing for {request.id}"

    def _wrong_hit(self, hit_blocks: int, uncached: Tokens, request: BookedRequest, instance: InstanceId) -> str:
        """What is wrong with a claimed hit. At least what is held or promised there, at most what was delivered lately, too."""
        model = self._model
        least, most = model.hit_blocks(request.keys, instance), model.hit_blocks_max(request.keys, instance)
        right = model.uncached(request.prompt_tokens, hit_blocks, instance)
        if least <= hit_blocks <= most and uncached == right:
            return ""
        return f"{hit_blocks} blocks, {uncached} tokens to compute, not {least} to {most}, {right}"

    def _candidates(
        self, candidates: list[Candidate], request: BookedRequest, now: Seconds, excluded: tuple[InstanceId, ...]
    ) -> Iterator[str]:
        """Who was weighed, and by which numbers."""
        model = self._model
        able = model.ready(request, excluded)
        for candidate in candidates:
            instance = candidate.instance
            if instance not in able:
                yield f"{instance} was weighed, and does not take {request.id}: {able}"
                continue
            uncached = candidate.uncached_tokens
            if problem := self._wrong_hit(candidate.hit_blocks, uncached, request, instance):
                yield f"{instance} was weighed with {problem}"
                continue
            queue = model.queued(instance, now)
            on_trial = model.on_trial(instance) and isclose(candidate.queue_seconds, queue, **SAME)
            if self._stall_counts and not on_trial:  # a trial goes there whatever the policy would say
                queue += model.stalled(instance, now)
            prefill = model.expected(instance, model.prefill_cost(request.prompt_tokens, uncached, instance), uncached)
            if not isclose(candidate.queue_seconds, queue, **SAME) or not isclose(
                candidate.prefill_seconds, prefill, **SAME
            ):
                yield (
                    f"{instance} was weighed with {candidate.queue_seconds} + {candidate.prefill_seconds} s, not "
                    f"{queue} + {prefill}"
                )
            transfer = candidate.predicted_ttft - queue - prefill
            if transfer < -1e-6 or (transfer > 1e-6 and model.instances[instance].role != "prefill"):
                yield f"{instance} was weighed with {candidate.predicted_ttft} s, which is not {queue + prefill}"

    def _first(self, instance: InstanceId) -> BookedRequest | None:
        """Who is to be granted next there."""
        waiting = self._model.at(instance, PENDING)
        if not waiting:
            return None
        if self._bounds.ordering == "edf":
            return min(waiting, key=lambda request: request.deadline)
        if self._bounds.ordering == "shortest_prefill":
            return min(waiting, key=lambda request: request.seconds + self._bounds.ageing * request.arrived_at)
        return waiting[0]

    def _fits(self, request: BookedRequest) -> bool:
        return self._room(request.instance, request.uncached)

    def _room(self, instance: InstanceId, tokens: Tokens) -> bool:
        bounds = self._bounds
        return self._model.has_room(
            instance, tokens, window_tokens=bounds.window_tokens, running_max=bounds.running_max
        )

    def _would_be_held(self, request: BookedRequest, now: Seconds) -> bool:
        held = sum(known.stage == ARRIVED for known in self._model.requests.values())
        in_time = now - request.arrived_at < self._bounds.hold_seconds - 1e-6
        return request.stage == ARRIVED and not request.excluded and in_time and held <= self._bounds.hold_max

    def _waiting(self) -> int:
        return sum(request.stage == PENDING for request in self._model.requests.values())

    def _full_line_allows(self) -> bool:
        return self._waiting() < self._bounds.pending_max

    def _under_way(self) -> int:
        """Re-bound requests without a first token."""
        return sum(r.rebound_from != NOBODY and r.stage == PREFILL for r in self._model.requests.values())
