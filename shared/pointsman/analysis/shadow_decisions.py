"""Decides each placement of a log again by other policies, from the state that its leader had (`LeaderOrder`), and
compares the choices. Predicted TTFT and hits of both choices are estimates on that one state. A shadow of the policy in
force therefore agrees always.

All shadows share one State, in the leader's order; at a takeover it begins again as a copy of the caller's, which is in
log order. Each shadow has trackers of its own in both, which observe what really happened."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from pointsman.analysis.shadow_figures import Agreement, DecisionFigures, ShadowDecision
from pointsman.analysis.what_if import Change, policies_in_force
from pointsman.contracts.codec import short_reason
from pointsman.contracts.decisions import LeaderElected, RequestPlaced, RequestRejected, Settings
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.admission import Refusal
from pointsman.policies.dispatch.placement import Answer, answer_to
from pointsman.policies.dispatch.turn import DecisionContext, Turn
from pointsman.policies.policy import Policy
from pointsman.policies.policy_set import PolicySet, policy_set, recorded_policy_set
from pointsman.policies.pool_view import PoolView
from pointsman.policies.seeded_random import uniform
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, WallSeconds, engine_seconds
from pointsman.primitives import Sequence as LogSequence
from pointsman.simulation.replay.folding import copy_state
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder, Step
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import NO_INSTANCE, UNGRANTED, Request

HELD_MAX = 4096
"""Entries held back until the leader has certainly read them."""
COPIED_BLOCKS_MAX = 1_000_000
"""A larger state is not copied at a takeover (2 s), but continued: then choices may differ a little from the leader's."""
BUCKET_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
BUCKETS_MAX = 240
DIFFERENCES_MAX = 100
CANDIDATES_PER_WALL_SECOND = 20_000
"""Instances that all shadows together may weigh, about a fifth of a core; beyond, decisions are sampled."""

UNTOLD = "no leader has told its policies yet"

Trackers = tuple[Tracker, ...]


class DecisionShadow:
    """One other policy. `problem`: why it cannot decide, in the present term."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.total = DecisionFigures(since=0.0)
        self.buckets: deque[DecisionFigures] = deque(maxlen=BUCKETS_MAX)
        self.differences: deque[ShadowDecision] = deque(maxlen=DIFFERENCES_MAX)
        self.failed = 0
        self.failure = ""
        self.problem = ""
        self.settings: Settings = {}
        """Those that differ from the settings in force."""
        self.context: DecisionContext | None = None
        self._kept: dict[Policy, tuple[Trackers, Trackers]] = {}
        """Trackers of each part of its policies, in the leader's order and in log order."""

    def choose_policies(self, running: PolicySet, state: State, log_state: State) -> None:
        try:
            policies = changed_policies(running, self.change)
        except ValueError as error:
            self.context, self.problem = None, str(error)
            return
        known = self._kept
        self._kept = {
            part: known[part]
            if part in known
            else (_brought_up(part.trackers(), state), _brought_up(part.trackers(), log_state))
            for part in (policies.routing, policies.admission, policies.ordering)
        }
        self.context, self.problem = DecisionContext(state, policies, term=state.term), ""
        in_force = running.placement_settings
        self.settings = {k: v for k, v in policies.placement_settings.items() if in_force.get(k) != v}

    def forget(self) -> None:
        self.context, self._kept, self.problem = None, {}, UNTOLD

    @property
    def trackers(self) -> Trackers:
        return tuple(tracker for trackers, _ in self._kept.values() for tracker in trackers)

    @property
    def log_trackers(self) -> Trackers:
        return tuple(tracker for _, trackers in self._kept.values() for tracker in trackers)

    def take_over(self, state: State, copied: Iterator[Tracker]) -> None:
        """`copied`: of the `log_trackers`, in their order, from `state`."""
        if self.context is not None:
            self.context = DecisionContext(state, self.context.policies, term=state.term)
        for part, (_, log_trackers) in self._kept.items():
            self._kept[part] = (tuple(islice(copied, len(log_trackers))), log_trackers)

    def add(self, decision: ShadowDecision, bucket: EngineSeconds) -> None:
        if not self.buckets or self.buckets[-1].since < bucket:
            self.buckets.append(DecisionFigures(since=bucket))
        self.total.since = self.total.since or decision.at
        self.total.add(decision)
        self.buckets[-1].add(decision)
        if decision.agreement not in ("same", "both_reject"):
            self.differences.append(decision)


class DecisionShadows:
    def __init__(self, changes: Sequence[Change], state: State, running: PolicySet | None) -> None:
        """`state` is the caller's, in log order, who applies each entry before `apply`; trackers are added to it. `running`:
        the policies in force, if known."""
        self.shadows = [DecisionShadow(change) for change in changes]
        self.sampled_out = 0
        self._running: tuple[str, Settings] | None = None
        self.begin_again(state, running)

    def begin_again(self, state: State, running: PolicySet | None) -> None:
        """Figures are kept, trackers are not."""
        self._log_state = state
        self._log_trackers = state.trackers
        """Not of shadows."""
        self._state = copy_state(state)
        self._running = None
        self._displacing: list[Step[LogEntry]] = []
        self._arrived: tuple[RequestId, EngineSeconds, LogSequence] | None = None
        self._second, self._decisions, self._share = 0.0, 0, 1.0
        for shadow in self.shadows:
            shadow.forget()
            if running is None:  # to observe from the first entry on; the first leader tells the others
                shadow.choose_policies(policy_set(), self._state, state)
                shadow.context, shadow.problem = None, UNTOLD
        self._keep_trackers()
        self._order: LeaderOrder[LogEntry] | None = None
        if state.term:
            self._order = LeaderOrder(state.term, held_max=HELD_MAX)
            self._order.resume(self._state)
        if running is not None:
            self._choose_policies(running)

    def apply(self, entry: LogEntry) -> None:
        event = entry.event
        if isinstance(event, LeaderElected) and event.term > self._state.term:
            self._finish_term()
            self._take_over(entry)
            self._order = LeaderOrder(event.term, held_max=HELD_MAX)
            self._note_policies(event.policy, event.settings)
            return
        if self._order is None and event is not None and event.stamp is not None:
            self._join_term(event.stamp)
        if self._order is None:
            self._state.apply_entry(entry)
        else:
            for step in self._order.feed(entry):
                self._take(step, self._order)

    def finish(self) -> None:
        """No entry follows."""
        self._finish_term()

    def _finish_term(self) -> None:
        if self._order is not None:
            for step in self._order.finish():
                self._take(step, self._order)
            self._carry_out(self._order)

    def _join_term(self, stamp: Stamp) -> None:
        """Its election is among the entries that are gone."""
        state = self._state
        state.term = state.recent_decisions.term = stamp.term
        state.recent_decisions.through = stamp.number - 1
        self._order = LeaderOrder(stamp.term, held_max=HELD_MAX)
        self._order.resume(state)

    def _take_over(self, entry: LogEntry) -> None:
        log_state = self._log_state
        if sum(log_state.index.blocks(instance.id) for instance in log_state.fleet.instances) > COPIED_BLOCKS_MAX:
            self._state.apply_entry(entry)
            return
        self._state = copy_state(log_state)
        copied = iter(self._state.trackers[len(self._log_trackers) :])
        for shadow in self.shadows:
            shadow.take_over(self._state, copied)
        self._keep_trackers()

    def _take(self, step: Step[LogEntry], order: LeaderOrder[LogEntry]) -> None:
        event = step.entry.event
        if step.kind is not Kind.DECIDED or event is None or event.stamp is None:
            self._carry_out(order)
            order.apply(step, self._state)
            return
        if isinstance(event, RequestRejected) and event.displaced_by:
            self._displacing.append(step)  # it was decided while that request still waited
            return
        if isinstance(event, RequestPlaced | RequestRejected):
            self._decide(event, step.entry.sequence, event.stamp.as_of)
        elif isinstance(event, RequestArrived):
            self._arrived = (event.request, event.at, event.stamp.as_of)
        self._carry_out(order)
        order.apply(step, self._state)

    def _carry_out(self, order: LeaderOrder[LogEntry]) -> None:
        for step in self._displacing:
            order.apply(step, self._state)
        self._displacing.clear()

    # Policies

    def _note_policies(self, routing: str, settings: Settings) -> None:
        """Of a leader, or of a placement of one whose election is not in the log."""
        if not settings or (routing, settings) == self._running:
            return
        try:
            running = recorded_policy_set(routing, settings)
        except (ValueError, TypeError) as error:
            self._running = (routing, settings)
            for shadow in self.shadows:
                shadow.context, shadow.problem = None, short_reason(error)
            return
        self._choose_policies(running)
        self._running = (routing, settings)

    def _choose_policies(self, running: PolicySet) -> None:
        self._running = (running.routing.name, running.placement_settings)
        for shadow in self.shadows:
            shadow.choose_policies(running, self._state, self._log_state)
        self._keep_trackers()

    def _keep_trackers(self) -> None:
        self._state.use_trackers(tracker for shadow in self.shadows for tracker in shadow.trackers)
        self._trackers = self._state.trackers
        own = (tracker for shadow in self.shadows for tracker in shadow.log_trackers)
        self._log_state.trackers = (*self._log_trackers, *own)

    # Decisions

    def _decide(self, event: RequestPlaced | RequestRejected, sequence: LogSequence, as_of: LogSequence) -> None:
        request = self._state.workload.requests.get(event.request)
        if request is None or request.over_limit is not None:
            return
        if not any(shadow.context for shadow in self.shadows) and isinstance(event, RequestPlaced):
            self._note_policies(event.policy, self._state.settings_of(event))
        if not self._is_sampled(event):
            self.sampled_out += 1
            return
        held = self._arrived != (event.request, event.at, as_of)
        seconds = engine_seconds(BUCKET_WALL_SECONDS, self._state.settings.speed)
        for shadow in self.shadows:
            if shadow.context is None:
                continue
            self._state.use_trackers(shadow.trackers)  # two shadows may have trackers of one class
            try:
                turn = Turn(shadow.context, event.at)
                answer = answer_to(turn, request, event.attempt, event.excluded, arrived_earlier=held)
                decision = None if answer is None else self._compared(request, event, answer, sequence)
            except Exception as error:  # noqa: BLE001 - a shadow may fail, its follower may not
                shadow.failed += 1
                shadow.failure = short_reason(f"{type(error).__name__}: {error}")
            else:
                if decision is not None:
                    shadow.add(decision, event.at // seconds * seconds)
            finally:
                self._state.trackers = self._trackers

    def _is_sampled(self, event: RequestPlaced | RequestRejected) -> bool:
        """The share of the next second follows from the load of this one."""
        second = event.at // self._state.settings.speed
        if second > self._second:
            weighed = self._decisions * len(self._state.fleet.ready) * len(self.shadows)
            self._share = min(1.0, CANDIDATES_PER_WALL_SECOND / weighed) if weighed else 1.0
            self._second, self._decisions = second, 0
        self._decisions += 1
        return self._share >= 1.0 or uniform(0, "shadow", event.request) < self._share

    def _compared(
        self, request: Request, event: RequestPlaced | RequestRejected, answer: Answer, sequence: LogSequence
    ) -> ShadowDecision:
        view = PoolView(self._state, request, event.at)
        running = shadow = NO_INSTANCE
        running_ttft = shadow_ttft = None
        running_cached = shadow_cached = 0
        if isinstance(event, RequestPlaced):
            running, running_cached = event.instance, request.prompt_tokens - event.uncached_tokens
            running_ttft = event.predicted_ttft
            if event.instance in self._state.fleet:
                estimate = view.candidate(event.instance, hit_blocks=event.hit_blocks, loads=tuple(event.loads))
                fetched = bool(event.fetch_from)  # in the estimate already
                running_ttft = estimate.predicted_ttft + (0.0 if fetched else event.transfer_seconds)
        if isinstance(answer.admitted, Refusal):
            reason = f"{answer.admitted.reason.value}: {answer.admitted.detail}"
        else:
            chosen, reason = answer.admitted.chosen, answer.admitted.reason
            estimate = view.candidate(chosen.instance, hit_blocks=chosen.hit_blocks, loads=chosen.loads)
            shadow, shadow_cached = chosen.instance, request.prompt_tokens - chosen.uncached_tokens
            shadow_ttft = estimate.predicted_ttft + answer.decode.transfer_seconds
        return ShadowDecision(
            sequence=sequence,
            at=event.at,
            request=event.request,
            tenant=request.tenant,
            agreement=_agreement(running, shadow),
            prompt_tokens=request.prompt_tokens,
            running_instance=running,
            running_reason=event.reason,
            running_cached_tokens=running_cached,
            running_predicted_ttft=running_ttft,
            shadow_instance=shadow,
            shadow_reason=reason,
            shadow_cached_tokens=shadow_cached,
            shadow_predicted_ttft=shadow_ttft,
        )


def changed_policies(running: PolicySet, change: Change) -> PolicySet:
    """Raises UnknownPolicyError, SettingTextError."""
    changed = change.of_policies(policies_in_force(running.routing.name, running.settings))
    return policy_set(
        routing=changed.routing,
        admission=changed.admission,
        ordering=changed.ordering,
        settings=changed.settings,
        prefill_window_tokens=running.prefill_window_tokens,
        running_max=running.running_max,
        pending_max=running.pending_max,
        hold_seconds=running.hold_seconds,
        hold_max=running.hold_max,
        rebind=running.rebind,
        recorded=True,
    )


def _brought_up(trackers: Trackers, state: State) -> Trackers:
    """Tells them of the instances and requests that are there already."""
    for tracker in trackers:
        tracker.fold_version = state.settings.fold_version
        for instance in state.fleet.instances:
            tracker.joined(instance.id, state.last_at)
        for request in sorted(state.workload.requests.values(), key=lambda request: request.arrived_at):
            tracker.arrived(request, request.arrived_at)
            if request.instance:
                tracker.placed(request, request.placed_at)
            if request.stage not in UNGRANTED:
                tracker.granted(request, request.granted_at)
    return trackers


def _agreement(running: InstanceId, shadow: InstanceId) -> Agreement:
    if running == shadow:
        return "same" if running else "both_reject"
    if not shadow:
        return "shadow_rejects"
    return "other" if running else "shadow_places"
