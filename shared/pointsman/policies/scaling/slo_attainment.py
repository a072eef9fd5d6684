"""As few instances as keep the TTFT SLO. Up if too few recent requests were on time, the shortest queue exceeds the
SLO, or requests are rejected or find no instance. Down if recent requests, run again without the least busy instance,
are on time by a margin. In a split pool also up if too few answers met their TBT objective, but only if another split
of the same instances would not help, and down if the split of one less keeps both roles below `busy_max` by a margin.
Source: signals of DualMap's elastic scaling; the rerun is our own. Bias: reacts late to a surge. Limit: the rerun
ignores decoding."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, POSITIVE_SHARE, SHARE, bounded
from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.policies.scaling.demand import MEASURED_SECONDS_MIN, attainment_without, least_worked, prefill_demand
from pointsman.policies.scaling.roles import RoleDemand, best_split, better_split, role_demand
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.service_window import Outcomes, Prefill, ServiceWindow
from pointsman.state.workload import Request, Stage

REFUSALS_MIN = 3


@dataclass(frozen=True)
class SloAttainment(ScalingPolicy):
    """`margin`: above `target`, to shrink. `window_s` is judged to grow, `calm_s` to shrink. `busy_max`: share of
    time in prefill; of decode instances the share of what TBT objectives and KV memory allow. `idle_s`: without arrivals
    until the last instance may go."""

    name: ClassVar[str] = "slo_attainment"

    target: float = bounded(0.9, SHARE)
    margin: float = 0.05
    window_s: EngineSeconds = bounded(30.0, POSITIVE)
    calm_s: EngineSeconds = 60.0
    outcomes_min: int = 20
    busy_max: float = bounded(0.7, POSITIVE_SHARE)
    idle_s: EngineSeconds = 300.0
    refused_max: float = bounded(0.03, SHARE)

    @override
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        window = state.tracker(ServiceWindow)
        if not size.ready and state.workload.requests:
            held = len(state.workload.requests)
            return ScaleTarget(max(size.wanted, 1), f"{held} requests wait and no instance is ready", deliberate=True)
        if size.roles.total:
            return self._split_target(state, size, window, now)
        if trouble := self._trouble(state, window, now):
            needed = self._needed(state, window, now)
            if size.ready < size.wanted:
                return ScaleTarget(
                    max(size.wanted, needed), f"{trouble}; {size.wanted - size.ready} of {size.wanted} are to come"
                )
            return ScaleTarget(max(size.wanted + 1, needed), trouble)
        return self._fewer(state, size, window, now)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ServiceWindow(max(self.window_s, self.calm_s)),)

    def _split_target(self, state: State, size: PoolSize, window: ServiceWindow, now: EngineSeconds) -> ScaleTarget:
        demand = role_demand(state, window, now, window_s=self.window_s, prefill=self.busy_max, decode=self.busy_max)
        loads = f"busy as wanted: {demand.prefill:.1f} of {size.roles.prefill} that prefill, {demand.decode:.1f} of {size.roles.decode} that decode"
        trouble = self._trouble(state, window, now) or self._slow_answers(state, window, now)
        if not trouble:
            fewer = self._fewer_of_split(state, size, window, demand, now)
            return ScaleTarget(fewer, loads, demand=demand)
        needed = max(size.wanted, ceil(demand.prefill) + ceil(demand.decode))
        waits = size.ready < size.wanted or now - state.scaling.changed_at(now).switched < self.window_s
        if not waits and better_split(demand, size.roles, size.fixed, step=1) == size.roles:
            needed = max(needed, size.wanted + 1)
        return ScaleTarget(needed, f"{trouble}; {loads}", demand=demand)

    def _slow_answers(self, state: State, window: ServiceWindow, now: EngineSeconds) -> str:
        since = self._since(state, now)
        answers = window.answers(since)
        in_time = sum(answer.in_time for answer in answers)
        if len(answers) < self.outcomes_min or in_time >= self.target * len(answers):
            return ""
        return (
            f"{in_time / len(answers):.1%} of {len(answers)} answers met their TBT objective, {self.target:.0%} should"
        )

    def _fewer_of_split(
        self, state: State, size: PoolSize, window: ServiceWindow, demand: RoleDemand, now: EngineSeconds
    ) -> int:
        if size.ready < size.wanted:
            return size.wanted
        changes = state.scaling.changed_at(now)
        if now - max(window.last_arrival_at, changes.up) >= self.idle_s and not state.workload.requests:
            return 0
        changed_at = max(changes)
        done = window.outcomes(max(now - self.calm_s, changed_at))
        if now - changed_at < self.calm_s or done.total < self.outcomes_min or size.wanted <= size.fixed.total:
            return size.wanted
        smaller = best_split(demand, size.wanted - 1, size.fixed)
        spare = smaller.total and demand.pressure(smaller) <= 1 - self.margin
        return size.wanted - 1 if spare and done.attainment >= min(1.0, self.target + self.margin) else size.wanted

    def _since(self, state: State, now: EngineSeconds) -> EngineSeconds:
        """What was before the pool grew or changed its roles says nothing of the pool as it is."""
        changes = state.scaling.changed_at(now)
        return max(now - self.window_s, changes.up, changes.switched)

    def _trouble(self, state: State, window: ServiceWindow, now: EngineSeconds) -> str:
        """Empty if the pool is large enough."""
        waiting = [r for r in state.workload.requests.values() if r.stage is not Stage.DECODING and not r.best_effort]
        done = window.outcomes(self._since(state, now))
        in_time = sum(_expected_in_time(request, now) for request in waiting)
        both = Outcomes(done.total + len(waiting), done.on_time + in_time, done.refused)
        if both.total < self.outcomes_min:
            return ""
        if done.refused >= REFUSALS_MIN and done.refused > self.refused_max * both.total:
            return f"{done.refused} of {both.total} requests were refused in {self.window_s:g} s"
        if both.attainment < self.target:
            return f"{both.attainment:.1%} of {both.total} requests are on time, {self.target:.0%} should be"
        return self._late_whatever(state, waiting, now)

    def _late_whatever(self, state: State, waiting: list[Request], now: EngineSeconds) -> str:
        queues, ready = state.workload.queues, state.fleet.ready
        if not waiting or not ready or not all(instance in queues for instance in ready):
            return ""
        newest = waiting[-1]
        shortest = min(state.queue_seconds(instance, now, newest.priority) for instance in ready)
        slo = newest.slo_ttft
        return f"even the shortest queue takes {shortest:.1f} s of {slo:g} s" if shortest > slo else ""

    def _needed(self, state: State, window: ServiceWindow, now: EngineSeconds) -> int:
        prefills = window.prefills(now - self.window_s)
        if not prefills:
            return 0
        span = max(MEASURED_SECONDS_MIN, now - prefills[0].at)
        return ceil(prefill_demand(state, prefills) / span / self.busy_max)

    def _fewer(self, state: State, size: PoolSize, window: ServiceWindow, now: EngineSeconds) -> ScaleTarget:
        if size.ready < size.wanted or not state.fleet.ready:
            return ScaleTarget(size.wanted, "not all that were wanted are there")
        changes = state.scaling.changed_at(now)
        idle = now - max(window.last_arrival_at, changes.up)
        if size.wanted == 1:
            if idle < self.idle_s or state.workload.requests:
                return ScaleTarget(1, "requests come")
            return ScaleTarget(0, f"no request has come for {idle:.0f} s")
        since = max(now - self.calm_s, changes.up, changes.down)
        if now - since < self.calm_s:
            return ScaleTarget(size.wanted, "the last change is too recent to judge")
        if window.last_arrival_at >= since and window.outcomes(since).total < self.outcomes_min:
            return ScaleTarget(size.wanted, "too few of the last requests have an outcome to judge")
        return self._without_one(state, size, window.prefills(since), window.outcomes(since))

    def _without_one(self, state: State, size: PoolSize, prefills: list[Prefill], done: Outcomes) -> ScaleTarget:
        level = min(1.0, self.target + self.margin)
        now_on_time = f"{done.attainment:.1%} of {done.total} requests were on time"
        if done.total and done.attainment < level:
            return ScaleTarget(size.wanted, now_on_time)
        without = attainment_without(state, prefills, least_worked(state, prefills))
        reason = f"{now_on_time}, and without one instance {without:.1%} would have been, of {level:.0%} needed"
        return ScaleTarget(size.wanted - 1 if without >= level else size.wanted, reason)


def _expected_in_time(request: Request, now: EngineSeconds) -> bool:
    if now > request.deadline:
        return False
    return request.stage is Stage.ARRIVED or request.placed_at + request.predicted_ttft <= request.deadline
