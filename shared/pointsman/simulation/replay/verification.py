"""Deciding everything again, and comparing it with what the log says was decided.

The leader's order is not the log's: it applied its own decisions at once. So the log is read with two cursors. One
looks ahead for decision *k* of a term, whose numbers are dense; the other applies, before *k* is judged, every other
entry up to the `as_of` of *k*. A term begins with the state in log order up to its LeaderElected, which a reader of its
own folds, since a follower that takes over has applied its predecessor's decisions where the log has them.

What decides again is the production Dispatcher, driven by the calls that its events tell of: a RequestArrived was a
`route`, a RequestGranted on its own a `grant_waiting`, and so on. Each decision it makes is compared with the next one
of the log, and the log's is applied, so that one difference is not the cause of the next. What the leader was asked
(RequestArrived; which moves a rebalancer planned) is taken from the log; that it was carried out by the rules, and all
figures, are recomputed. What the leader did *not* decide is seen where it belongs to a call that did decide something.

Bounds: a term that has been succeeded is watched for STRAGGLERS_MAX more entries, and a decision may come at most
DISORDER_MAX others early; what is missing then is a hole, and nothing behind it in that term can be recomputed.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.commands import HandOverRequest, RouteRequest
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
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.reasons import MoveCause
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled, RequestEvent
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, recorded_policy_set
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, Sequence, Term
from pointsman.simulation.replay.folding import (
    BaseState,
    apply_entry,
    copy_state,
    entries_after,
    recorded_pool_settings,
)
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder, Step
from pointsman.simulation.replay.verdict import Difference, Recomputed, TermSummary, Verdict, Watch, known_to
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import NO_INSTANCE, Request

STRAGGLERS_MAX = 20_000

_ANSWERS = (RequestPlaced, RequestRejected, RequestHandedOver, HandOverRefused)


def verify(entries: Iterable[LogEntry], *, watch: Watch | None = None, known: BaseState | None = None) -> Verdict:
    """Recompute every decision of a log.

    `entries` are iterated once, and once more up to each later takeover: a list or anything else that can be read
    again, from the log's first entry on or, where there is `known`, from the one behind that; what comes before is passed
    over. `watch` is shown each decision just before it is applied.
    """
    return _Verification(entries, watch, known).run()


class _Verification:
    """One reading of one log."""

    def __init__(self, log: Iterable[LogEntry], watch: Watch | None, known: BaseState | None) -> None:
        self._log = log
        self._watch = watch
        self._known = known
        self._verdict = Verdict()
        self._tenures: dict[Term, _Tenure] = {}
        self._successions: deque[tuple[Sequence, Term]] = deque()
        self._elected: dict[Term, LeaderElected] = {}
        self._refused: dict[Term, str] = {}
        self._follower: _Follower | None = None
        self._last: Sequence = 0
        self._incomplete = ""
        if known is not None:
            self._join(known)

    def run(self) -> Verdict:
        for entry in self._log if self._known is None else entries_after(self._known.state.sequence, self._log):
            self._take(entry)
        for tenure in self._tenures.values():
            tenure.close()
        return self._verdict

    def _join(self, known: BaseState) -> None:
        """Begin in the middle of a term, which cannot be judged: `known` is in the order of the log, not its leader's."""
        state = known.state
        self._last = self._verdict.known_as_of = state.sequence
        self._follower = _Follower(self._log, state.settings, known.policies, copy_state(state))
        self._refused[state.term] = (
            f"term {state.term} began before entry {state.sequence + 1}: in what order its leader applied what came "
            "before is gone"
        )

    def _take(self, entry: LogEntry) -> None:
        verdict, event = self._verdict, entry.event
        verdict.entries += 1
        if entry.sequence != self._last + 1:
            self._miss(entry.sequence)
        self._last = entry.sequence
        for tenure in self._tenures.values():
            tenure.feed(entry)
        if event is None:
            verdict.undecodable += 1
        elif event.stamp is not None:
            self._count(event, event.stamp.term)
        elif isinstance(event, LeaderElected):
            self._begin(event, entry.sequence)
        if self._successions and entry.sequence > self._successions[0][0]:
            self._close(self._successions.popleft()[1])

    def _count(self, event: LogEvent, term: Term) -> None:
        if isinstance(event, RequestArrived):
            self._verdict.arrivals += 1
            return
        self._verdict.decisions += 1
        if term not in self._tenures:
            self._verdict.unchecked[self._why_unchecked(term)] += 1

    def _why_unchecked(self, term: Term) -> str:
        if self._incomplete:
            return self._incomplete
        return self._refused.get(term, f"the log does not say how term {term} began")

    def _begin(self, elected: LeaderElected, sequence: Sequence) -> None:
        term = elected.term
        known = self._elected.setdefault(term, elected)
        if known is not elected:
            if known.scheduler != elected.scheduler:
                self._verdict.problems.append(
                    f"two leaders in term {term}: {known.scheduler}, and {elected.scheduler} at entry {sequence}"
                )
            return
        summary = TermSummary(term, elected.scheduler, elected.policy, sequence)
        self._verdict.terms.append(summary)
        self._successions.extend((sequence + STRAGGLERS_MAX, earlier) for earlier in self._tenures)
        if self._incomplete:
            return
        try:
            policies = recorded_policy_set(elected.policy, elected.settings)
            follower = self._follower_for(elected, policies)
        except (UnknownPolicyError, TypeError, ValueError) as error:
            self._refused[term] = f"term {term}: {short_reason(error)}"
            return
        if follower is None:
            self._refused[term] = f"term {term}: with its policies, nothing is known of the entries that are gone"
            return
        self._tenures[term] = _Tenure(follower.state_at(sequence), policies, summary, self._verdict, self._watch)

    def _follower_for(self, elected: LeaderElected, policies: PolicySet) -> "_Follower | None":
        """Who was told the same, or one who begins anew; None where the log's beginning is gone."""
        settings = recorded_pool_settings(elected.pool)
        follower = self._follower
        if follower is not None and follower.fits(settings, policies):
            return follower
        if self._known is not None:
            return None
        follower = self._follower = _Follower(self._log, settings, policies, State(settings, policies.trackers()))
        return follower

    def _miss(self, sequence: Sequence) -> None:
        """Entries are missing: what they did to the state is not known, here or in any later term."""
        if self._last == 0:
            self._incomplete = f"the log begins at entry {sequence}: what was known before is not in it"
        else:
            self._incomplete = f"entries {self._last + 1} to {sequence - 1} are missing"
            self._verdict.problems.append(self._incomplete)
        for term in list(self._tenures):
            self._close(term)

    def _close(self, term: Term) -> None:
        tenure = self._tenures.pop(term, None)
        if tenure is not None:
            tenure.close()
            self._refused.setdefault(term, f"term {term} was over long before")


class _Follower:
    """Folds in log order, on demand: only a takeover needs it."""

    def __init__(self, log: Iterable[LogEntry], settings: PoolSettings, policies: PolicySet, state: State) -> None:
        self._settings = settings
        self._policies = policies
        self._entries: Iterator[LogEntry] = entries_after(state.sequence, log)
        self._state = state

    def fits(self, settings: PoolSettings, policies: PolicySet) -> bool:
        """Whether it folds as they say. Outlier detection is no part of the fold, and decisions do not tell its settings."""
        folded_alike = replace(policies, outliers=self._policies.outliers)
        return (settings, folded_alike) == (self._settings, self._policies)

    def state_at(self, sequence: Sequence) -> State:
        """A state of the caller's own, with everything up to entry `sequence` applied."""
        state = self._state
        while state.sequence < sequence:
            apply_entry(state, next(self._entries))
        return copy_state(state)


class _NotWrittenError(Exception):
    """The Dispatcher decided something that the log does not have next: its call ends here."""


class _Tenure:
    """One term: its leader's state, and its decisions in the order of their numbers."""

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
        self._tape: deque[tuple[LogEntry, LogEvent]] = deque()
        """Decisions of one moment (`now` and `as_of`): a call writes no others."""
        self._ends = False
        self._is_cut = False

    def feed(self, entry: LogEntry) -> None:
        stamp = entry.event.stamp if entry.event is not None else None
        if stamp is not None and stamp.term == self._term:
            self._summary.decisions = max(self._summary.decisions, stamp.number)
        for step in self._order.feed(entry):
            self._take(step)

    def close(self) -> None:
        """The term has no more decisions: judge what is left. Its last call may have been cut short by the end."""
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
            self._tape.append((entry, event))
        elif step.kind is Kind.LOST:
            self._pass_over(event)
        elif not isinstance(event, RequestArrived):
            self._verdict.decisions -= 1  # written twice, as writes may be

    def _pass_over(self, event: LogEvent) -> None:
        """Judge what came before the hole, and nothing behind it."""
        hole = self._order.hole
        if not self._is_cut:
            self._is_cut = self._ends = True
            self._judge_moment()
            self._verdict.problems.append(hole)
        if not isinstance(event, RequestArrived):
            self._verdict.unchecked[f"{hole}: nothing behind them in that term can be recomputed"] += 1

    # One moment

    def _judge_moment(self) -> None:
        tape = self._tape
        if not tape:
            return
        while tape:
            entry, event = tape[0]
            assert event.stamp is not None
            self._dispatcher.decided = event.stamp.number - 1
            with contextlib.suppress(_NotWrittenError):
                try:
                    self._decide_again(event)
                except Exception as error:  # noqa: BLE001 - the leader's command failed so too, after what it had decided
                    self._verdict.failed[short_reason(f"{type(error).__name__}: {error}")] += 1
            if tape and tape[0][1] is event:
                self._differ(entry, event, None)
                self._state.apply(event)
                tape.popleft()

    def _decide_again(self, event: LogEvent) -> None:
        """Make the call that led to this decision; `_compare` is shown all that it decides."""
        dispatcher, now = self._dispatcher, event.at
        match event:
            case RequestArrived():
                dispatcher.route(self._command(event), now)
            case RequestHandedOver() | HandOverRefused():
                dispatcher.hand_over(_handed_over(event), now)
            case RequestPlaced() | RequestRejected():
                known = self._state.workload.requests.get(event.request)
                if known is not None:
                    dispatcher.route(_asked_again(known, event), now)
            case RequestGranted() | PrefillFinished():
                dispatcher.grant_waiting(event.instance, now)
            case RequestCancelled():
                end = dispatcher.cancel if event.instance == NO_INSTANCE else dispatcher.abandon
                end(event.request, event.cause, now, reason=event.reason)
            case RequestMigrated(cause=MoveCause.RELOCATED):
                dispatcher.relocate_pending(now)
            case RequestMigrated() | MigrationRefused():
                dispatcher.migrate(self._plan(event), now)
            case InstanceSuspected() | InstanceLeft() if event.patience is not None:
                dispatcher.check_liveness(event.patience, now)
            case InstanceDraining():
                dispatcher.drain(event.instance, event.reason, now, leaving=event.leaving)
            case InstanceUndrained():
                dispatcher.undrain(event.instance, now)
            case InstanceEjected() | InstanceUnejected():
                dispatcher.eject_outliers(now)
            case _:
                self._take_as_given(event)

    def _command(self, arrived: RequestArrived) -> RouteRequest:
        """What the ingress asked for; how often it had asked before is known from the answer."""
        attempt, excluded = 1, list[InstanceId]()
        answer = self._tape[1][1] if len(self._tape) > 1 else None
        if isinstance(answer, RequestPlaced | RequestRejected) and answer.request == arrived.request:
            attempt, excluded = answer.attempt, answer.excluded
        return RouteRequest(
            request=arrived.request,
            ingress=arrived.ingress,
            arrived_at=arrived.arrived_at,
            tenant=arrived.tenant,
            keys=arrived.keys,
            prompt_tokens=arrived.prompt_tokens,
            max_output_tokens=arrived.max_output_tokens,
            slo_ttft=arrived.slo_ttft,
            slo_tpot=arrived.slo_tpot,
            session=arrived.session,
            exact=arrived.exact,
            streaming=arrived.streaming,
            adapter=arrived.adapter,
            followed=arrived.followed,
            held_up=arrived.held_up,
            alias=arrived.alias,
            context_tokens=arrived.context_tokens,
            attempt=attempt,
            excluded=excluded,
        )

    def _plan(self, first: RequestMigrated | MigrationRefused) -> MigrationPlan:
        """What was asked for by one command; each of its moves was made or refused."""
        moves: list[Migration] = []
        for _, event in self._tape:
            if isinstance(event, RequestGranted) and moves and moves[-1].rebind and moves[-1].request == event.request:
                continue  # what was re-bound is granted before the next move is looked at
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
        self._tape.popleft()

    def _compare(self, recomputed: LogEvent) -> LogEvent:
        """What the log has in the place of this decision. Raises _NotWrittenError where it has nothing."""
        tape = self._tape
        if not tape or not _same_subject(tape[0][1], recomputed):
            if tape or not self._ends:
                self._differ(None, None, recomputed)
            raise _NotWrittenError
        entry, recorded = tape[0]
        if self._watch is not None:
            self._watch(Recomputed(entry.sequence, recorded, recomputed, self._state))
        if recorded != recomputed:
            self._differ(entry, recorded, recomputed)
        elif not isinstance(recorded, RequestArrived):
            self._verdict.identical += 1
        tape.popleft()
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
                known=known_to(self._state, event),
            )
        )


def _asked_again(request: Request, answer: RequestPlaced | RequestRejected) -> RouteRequest:
    """The command by which an ingress asked for a place for a request that the leader knew already."""
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
    )


def _handed_over(event: RequestHandedOver | HandOverRefused) -> HandOverRequest:
    """The command that said that a prefill was over."""
    return HandOverRequest(request=event.request, attempt=event.attempt, instance=event.source, prefill=event.prefill)


def _same_subject(recorded: LogEvent, recomputed: LogEvent) -> bool:
    """Whether two events answer the same question, however differently."""
    if isinstance(recorded, _ANSWERS) and isinstance(recomputed, _ANSWERS):
        return recorded.request == recomputed.request
    if type(recorded) is not type(recomputed):
        return False
    if isinstance(recorded, RequestGranted) and isinstance(recomputed, RequestGranted):
        return recorded.instance == recomputed.instance
    if isinstance(recorded, RequestEvent) and isinstance(recomputed, RequestEvent):
        return recorded.request == recomputed.request
    return getattr(recorded, "instance", None) == getattr(recomputed, "instance", None)
