"""Instances: silent, gone, restarted, flapping, of another model, never joined, or fewer than wanted."""

from collections import Counter, deque
from collections.abc import Iterator

from typing_extensions import override

from pointsman.analysis.restarts import Restarts
from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import ScaleDecided
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceLeft, InstanceReported, InstanceSuspected
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.manual import Manual
from pointsman.policies.scaling.roles import drained_by_operators
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, times
from pointsman_cli.formatting import plural
from pointsman_cli.options import as_given
from pointsman_cli.terminal import wall_time

FLAPS_MIN = 3
FLAP_WALL_SECONDS = 300.0
RECENT_WALL_SECONDS = 600.0


SHORT_WALL_SECONDS_MIN = 60.0
"""An engine may take so long to start."""


class FleetHealth(Examiner):
    area = "fleet"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._suspected: Counter[InstanceId] = Counter()
        self._silent_for: dict[InstanceId, EngineSeconds] = {}
        self._left: dict[InstanceId, list[str]] = {}
        self._stopped: set[InstanceId] = set()
        self._refused: set[InstanceId] = set()
        self._restarts = Restarts()
        self._restarted: Counter[InstanceId] = Counter()
        self._elsewhere: dict[InstanceId, tuple[str, str]] = {}
        """Joined at another URL while they were there: before and then."""
        self._down: Counter[InstanceId] = Counter()
        self._away_at: dict[InstanceId, deque[EngineSeconds]] = {}
        self._away: set[InstanceId] = set()
        self._back_at: dict[InstanceId, EngineSeconds] = {}
        self._flapped_at: dict[InstanceId, EngineSeconds] = {}
        self._serving: dict[InstanceId, bool] = {}
        self._blind = False
        self._unschedulable: dict[InstanceId, str] = {}

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        self._blind = blind
        self._serving = {instance.id: instance.serving for instance in state.fleet.instances}

    @override
    def before(self, event: LogEvent, state: State) -> None:
        match event:
            case InstanceSuspected():
                self._suspected[event.instance] += 1
                silent = self.wall(event.silent_seconds)
                self._silent_for[event.instance] = max(silent, self._silent_for.get(event.instance, 0.0))
                self._went_away(event.instance, event.at)
            case InstanceLeft():
                self._left.setdefault(event.instance, []).append(event.reason or "no reason given")
                del self._left[event.instance][:-3]
                if event.refused:
                    self._refused.add(event.instance)
                if event.stamp is None:
                    self._stopped.add(event.instance)
                else:
                    self._went_away(event.instance, event.at)
            case InstanceJoined():
                self._stopped.discard(event.instance)
                self._refused.discard(event.instance)
                known = state.fleet.get(event.instance)
                was_there = known is not None and event.epoch > known.epoch
                if known is not None and was_there and event.url != known.url:
                    self._elsewhere[event.instance] = known.url, event.url
                self._note_restart(self._restarts.take(event, was_there=was_there))
                self._came_back(event.instance, event.at)
            case CacheEvent():
                self._note_restart(self._restarts.take(event, was_there=True))
            case InstanceReported():
                reporter = state.fleet.get(event.instance)
                if reporter is not None and reporter.unschedulable:
                    self._unschedulable[event.instance] = reporter.unschedulable
                if self._serving.get(event.instance, True) and not event.serving:
                    self._down[event.instance] += 1
                    self._went_away(event.instance, event.at)
                elif event.serving:
                    self._came_back(event.instance, event.at)
                self._serving[event.instance] = event.serving
            case _:
                pass

    def _note_restart(self, joined: InstanceJoined | None) -> None:
        if joined is not None:
            self._restarted[joined.instance] += 1
            self._went_away(joined.instance, joined.at)
            self._came_back(joined.instance, joined.at)

    def _went_away(self, instance: InstanceId, at: EngineSeconds) -> None:
        """Counts an absence once: it may be suspected, leave and join again with another epoch."""
        if instance in self._away or self._back_at.get(instance) == at:
            return
        self._away.add(instance)
        times = self._away_at.setdefault(instance, deque(maxlen=FLAPS_MIN))
        times.append(at)
        if len(times) == FLAPS_MIN and self.wall(times[-1] - times[0]) < FLAP_WALL_SECONDS:
            self._flapped_at[instance] = at

    def _came_back(self, instance: InstanceId, at: EngineSeconds) -> None:
        if instance in self._away:
            self._away.remove(instance)
            self._back_at[instance] = at

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for joined in self._restarts.open():
            self._note_restart(joined)
        yield from self._flapping()
        if self._unschedulable:
            yield self.serious(
                f"{', '.join(self._unschedulable)} took no requests: another model than the pool's",
                [f"{instance}: {reason}" for instance, reason in self._unschedulable.items()],
                "Start its engine with the pool's model (--served-model-name), or its worker with another --pool.",
            )
        yield from self._gone(state)
        yield from self._troubled()
        if (unregistered := sorted(state.unregistered.keys() - self._refused)) and not self._blind:
            yield self.warning(
                f"{', '.join(unregistered)} reports but never joined, according to this log",
                [],
                "A leader asks it to join again. If that goes on, restart its worker.",
            )

    def _flapping(self) -> Iterator[Finding]:
        recent = [name for name, at in self._flapped_at.items() if self.wall(self.time.now - at) < RECENT_WALL_SECONDS]
        if recent:
            yield self.serious(
                f"{', '.join(recent)} went away and came back again and again",
                [self._history_of(instance) for instance in recent],
                "Take it out (drain it) until its worker's and its engine's logs say why.",
            )
        if earlier := {name: at for name, at in self._flapped_at.items() if name not in recent}:
            last = wall_time(max(earlier.values()), self.settings.speed)
            yield self.warning(
                f"{', '.join(earlier)} went away and came back again and again, until {last:%Y-%m-%d %H:%M:%S}",
                [self._history_of(instance) for instance in earlier],
                "It has stayed since. Its worker's and its engine's logs say why.",
            )

    def _gone(self, state: State) -> Iterator[Finding]:
        ready = state.fleet.ready
        gone = [name for name in self._left if name not in state.fleet and name not in self._stopped]
        unwell = [i.id for i in state.fleet.instances if i.status in (Status.SUSPECTED, Status.DOWN)]
        unknown = self._blind and state.unregistered
        asleep = state.scaling.wanted == 0
        idle = [] if asleep else [i.id for i in state.fleet.instances if i.draining and i.id not in unwell]
        if state.fleet.unserved and not unknown and (gone or unwell or idle):
            yield self.ongoing(
                f"at the end of the log {state.fleet.unserved}",
                [self._history_of(name) for name in dict.fromkeys((*gone, *unwell))]
                + [f"{name} drains: pointsman drain{fleet_as_given()} {name} --undo" for name in idle],
                "Start the engines and their workers, or take back who drains; requests wait up to --hold-seconds and then "
                f"get 503 no_instance. {self._refusal_of(gone)}".strip(),
            )
        elif gone or unwell:
            names = list(dict.fromkeys((*gone, *unwell)))
            yield self.warning(
                f"at the end of the log {', '.join(names)} is away, {len(ready)} take requests"
                + (f", of {len(state.unregistered)} that is not known" if unknown else ""),
                [self._history_of(name) for name in names],
                self._advice_on(names),
            )

    def _advice_on(self, names: list[InstanceId]) -> str:
        stopped = (
            "" if self._refused.issuperset(names) else "Look at its engine and its worker: it was not stopped in order."
        )
        return f"{stopped} {self._refusal_of(names)}".strip()

    def _refusal_of(self, names: list[InstanceId]) -> str:
        refused = ", ".join(name for name in names if name in self._refused)
        return (
            f"The leader refuses the URL of {refused}: name it in --engine-urls if it is yours, else stop that worker or give "
            "it another name."
            if refused
            else ""
        )

    def _troubled(self) -> Iterator[Finding]:
        silent = [name for name in self._suspected if name not in self._flapped_at and name not in self._away]
        if silent:
            yield self.warning(
                f"{plural(len(silent), 'worker')} fell silent for a while: {', '.join(silent)}",
                [self._history_of(name) for name in silent],
                "Its process or its way to nats-server stood still; a busy machine does that too.",
            )
        restarted = [name for name in (*self._restarted, *self._down) if name not in self._flapped_at]
        if restarted:
            yield self.note(
                f"{', '.join(dict.fromkeys(restarted))} started again or stood still, with its cache lost or in doubt",
                [self._history_of(name) for name in dict.fromkeys(restarted)],
            )
        if self._elsewhere:
            yield self.note(
                f"{', '.join(self._elsewhere)} joined at another URL while it was there",
                [f"{name}: {before}, then {then}" for name, (before, then) in self._elsewhere.items()],
                "If both engines run, two workers have one name and only the later one counts: give one another --instance.",
            )

    def _history_of(self, name: InstanceId) -> str:
        parts = [
            (self._suspected[name], f"suspected {times(self._suspected[name])} after up to {self._silent_for.get(name, 0.0):.1f} s of silence"),
            (self._down[name], f"its engine stopped answering {times(self._down[name])}"),
            (self._restarted[name], f"joined again {times(self._restarted[name])}"),
            (name in self._left, f"left: {'; '.join(self._left.get(name, []))}"),
        ]  # fmt: skip
        return (
            f"{name}: {', '.join(words for happened, words in parts if happened) or 'since before this reading begins'}"
        )


class FleetSize(Examiner):
    """Fewer engines ready than the scaler wants, at the end of the log. Not of a manual policy before somebody asked for a size:
    with a static provider that is what was there, and nobody's wish."""

    area = "fleet"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._short_since: EngineSeconds | None = None

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        self._look(state)

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if isinstance(event, FleetEvent | ScaleDecided):
            self._look(state)

    def _look(self, state: State) -> None:
        if len(in_service(state)) >= _wanted(state):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = self.time.now

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if self._short_since is None:
            return
        seconds, wanted, ready = self.wall(self.time.now - self._short_since), _wanted(state), len(in_service(state))
        if seconds < SHORT_WALL_SECONDS_MIN:
            return
        yield self.warning(
            f"fewer engines ready than wanted for {seconds:.0f} s: {ready} of {wanted}",
            list(_reasons(state, wanted)),
            f"`pointsman scale{as_given()}` shows what the scaler is in trouble with; its log has `instance_ended` for each engine "
            "that ended by itself.",
        )


def _wanted(state: State) -> int:
    decided = state.scaling.decided
    if decided is None or (decided.policy == Manual.name and not decided.by):
        return 0
    return decided.wanted


def _reasons(state: State, wanted: int) -> Iterator[str]:
    """Drained by operators: replaced, so that they are not missing."""
    drained = {instance.id for instance in drained_by_operators(state.fleet)}
    there = [instance for instance in state.fleet.instances if instance.id not in drained]
    if len(there) < wanted:
        yield f"{wanted - len(there)} not in the fleet: not started, ended, or without a worker that joined"
    for instance in there:
        if instance.status is not Status.READY:
            yield f"{instance.id}: {instance.status}"
        elif not instance.answered:
            yield f"{instance.id}: has not answered yet"
    if state.scaling.decided is not None:
        yield f"{wanted} were decided because: {state.scaling.decided.reason}"
