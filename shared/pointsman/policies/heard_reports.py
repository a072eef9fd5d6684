"""Reports of workers, most of which only the leader gets (`cmd.heartbeat`). In: State, a report, the leader's time. Out: when each
instance was heard last, and whether the worker must write the report to the log because the fold would learn from it. Reports that
are not written change no decision; the load that State knows is at most a bounded time old. Limit: forgotten with the term."""

from dataclasses import dataclass
from zlib import crc32

from pointsman.contracts.fleet import InstanceJoined, InstanceReported
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, Sequence, WallSeconds, engine_seconds
from pointsman.state import holdings
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE

PULSE_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
"""The longest time without a report in the log; the shortest is two thirds of it, by the instance's name, so that pulses
spread."""
LOAD_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
"""How often a load that only differs in numbers is logged."""
EXCUSED_WALL_SECONDS_MAX: WallSeconds = WallSeconds(1200.0)
"""Of a worker that restarts, whatever it asks for: 10 s and 1 s for each of at most 1024 engines are less."""
KV_USAGE_STEP = 0.05
GRANTED_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""An engine's figures may be so old: it cannot know of requests granted since."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """`folded`: cache event that State had when the report of `sequence` came."""

    epoch: Epoch
    sequence: Sequence
    folded: Sequence


class HeardReports:
    def __init__(self) -> None:
        self._heard_at: dict[InstanceId, EngineSeconds] = {}
        """By the leader's clock."""
        self._before: dict[InstanceId, _Heard] = {}

    def note(self, state: State, report: InstanceReported, now: EngineSeconds) -> bool:
        """Whether the report is needed in the log."""
        instance = state.current(report.instance, report.epoch)
        if instance is None:
            return True
        self._heard_at[instance.id] = now
        before = self._before.get(instance.id)
        self._before[instance.id] = _Heard(report.epoch, report.sequence, instance.sequence)
        if before is not None and before.epoch != report.epoch:
            before = None
        return (
            _is_due(state, instance, report)
            or _standing_differs(instance, report)
            or _cache_differs(state, instance, report, before)
            or _load_differs(state, instance, report, now)
        )

    def read(self, state: State, event: InstanceJoined | InstanceReported, now: EngineSeconds) -> None:
        """Of the log, once it is applied. An old copy tells nothing."""
        instance = state.current(event.instance, event.epoch)
        if instance is not None and event.at == instance.heard_at:
            self._heard_at[instance.id] = now

    def silent_since(
        self, state: State, now: EngineSeconds, steady_since: EngineSeconds
    ) -> dict[InstanceId, EngineSeconds]:
        """From when silence counts, by the leader's evidence outside the log: the last heartbeat, and the time that a
        restarting worker asked for, by no date of its own. Of a worker that only the leader before heard, from
        `steady_since` on. Heartbeats after now are from before our clock was set back: they excuse nobody."""
        longest = engine_seconds(EXCUSED_WALL_SECONDS_MAX, state.settings.speed)
        heard = {name: at for name, at in self._heard_at.items() if at <= now}
        for instance in state.fleet.instances:
            if instance.excused_until:
                asked = max(0.0, min(instance.excused_until - instance.heard_at, longest))
                heard[instance.id] = heard.get(instance.id, steady_since) + asked
        return heard

    def was_heard(self, instance: InstanceId, now: EngineSeconds, *, within: EngineSeconds) -> bool:
        at = self._heard_at.get(instance)
        return at is not None and 0.0 <= now - at < within

    def forget_absent(self, state: State) -> None:
        for gone in [name for name in self._heard_at if name not in state.fleet]:
            del self._heard_at[gone]
            self._before.pop(gone, None)


def pulse_seconds(instance: InstanceId) -> WallSeconds:
    return PULSE_WALL_SECONDS * (1 - crc32(instance.encode()) % 1000 / 3000)


def _is_due(state: State, instance: Instance, report: InstanceReported) -> bool:
    """Also if the worker's clock has gone back."""
    return not 0 <= report.at - instance.heard_at < engine_seconds(pulse_seconds(instance.id), state.settings.speed)


def _standing_differs(instance: Instance, report: InstanceReported) -> bool:
    return (
        instance.suspected
        or instance.serving != report.serving
        or (report.serving and not (instance.answered and instance.counted))
        or instance.adapters != tuple(report.adapters)
        or instance.aliases != tuple(report.aliases)
        or instance.certain != report.certain
        or bool(instance.excused_until or report.back_within)
    )


def _cache_differs(state: State, instance: Instance, report: InstanceReported, before: _Heard | None) -> bool:
    """A report may overtake cache events, or they it: sequences differ only if they did so at the heartbeat before."""
    if instance.cache == "no_events":
        return False
    if instance.doubt:
        return True
    if report.sequence > instance.sequence:
        return before is not None and before.sequence > instance.sequence
    if report.sequence < instance.sequence:
        return before is not None and before.folded > report.sequence
    return state.contradictions.is_open(instance.id) or bool(holdings.difference(state, report))


def _load_differs(state: State, instance: Instance, report: InstanceReported, now: EngineSeconds) -> bool:
    """State must not take an engine for idle that works, nor for working if its requests are lost there."""
    speed, busy = state.settings.speed, bool(report.waiting or report.running)
    if not report.serving:
        return False
    if busy and (instance.idle_since or not instance.counts_load):
        return True
    if not busy and _expects_work(state, instance, now - engine_seconds(GRANTED_WALL_SECONDS, speed)):
        return True
    if not busy and not instance.idle_since and instance.draining:
        return True
    changed = (report.waiting, report.running) != (instance.waiting, instance.running)
    changed = changed or abs(report.kv_usage - instance.kv_usage) >= KV_USAGE_STEP
    return changed and report.at - instance.heard_at >= engine_seconds(LOAD_WALL_SECONDS, speed)


def _expects_work(state: State, instance: Instance, before: EngineSeconds) -> bool:
    queue = state.workload.queues.get(instance.id, EMPTY_QUEUE)
    return any(r.granted_at < before for granted in (queue.prefill, queue.decoding) for r in granted.values())
