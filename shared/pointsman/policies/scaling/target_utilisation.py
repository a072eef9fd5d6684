"""Keeps prefill time and KV memory near a target. Source: Kubernetes' horizontal autoscaler, `ceil(ready * measured /
target)` with a tolerance; the busier resource counts. In a split pool prefill time sizes the prefill instances; KV
memory, or the answers that TPOT objectives allow at once, the others. Bias: ignores TTFT SLOs; late in bursts."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from typing_extensions import override

from pointsman.bounds import POSITIVE, POSITIVE_SHARE, bounded
from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.policies.scaling.demand import prefill_demand
from pointsman.policies.scaling.roles import best_split, role_demand
from pointsman.primitives import EngineSeconds, plain_sum
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.service_window import ServiceWindow


@dataclass(frozen=True)
class TargetUtilisation(ScalingPolicy):
    """`prefill`, `kv`: target shares; `kv` of answers within TPOT, too, in a split pool. `tolerance`: relative."""

    name: ClassVar[str] = "target_utilisation"

    prefill: float = bounded(0.6, POSITIVE_SHARE)
    kv: float = bounded(0.8, POSITIVE_SHARE)
    window_s: EngineSeconds = bounded(60.0, POSITIVE)
    tolerance: float = 0.1

    @override
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        if not size.ready:
            return ScaleTarget(max(size.wanted, 1), "no instance is ready")
        if size.roles.total:
            return self._split_target(state, size, now)
        prefills = state.tracker(ServiceWindow).prefills(now - self.window_s)
        busy = prefill_demand(state, prefills) / self.window_s / size.ready
        ready = [instance for instance in state.fleet.instances if instance.id in state.fleet.ready]
        full = plain_sum(instance.kv_usage for instance in ready) / len(ready) if ready else 0.0
        measured = f"prefill is {busy:.0%} in use of {self.prefill:.0%}, KV memory {full:.0%} of {self.kv:.0%}"
        ratio = max(busy / self.prefill, full / self.kv)
        if abs(ratio - 1) <= self.tolerance or size.ready < size.wanted:
            return ScaleTarget(size.wanted, measured)
        return ScaleTarget(max(1, ceil(size.ready * ratio)), measured)

    def _split_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        window = state.tracker(ServiceWindow)
        demand = role_demand(state, window, now, window_s=self.window_s, prefill=self.prefill, decode=self.kv)
        measured = f"{demand.prefill:.1f} of {size.roles.prefill} that prefill and {demand.decode:.1f} of {size.roles.decode} that decode are needed"
        needed = max(2, ceil(demand.prefill) + ceil(demand.decode))
        pressure = demand.pressure(best_split(demand, size.wanted, size.fixed))
        if abs(pressure - 1) <= self.tolerance or size.ready < size.wanted:
            needed = size.wanted
        return ScaleTarget(needed, measured, demand=demand)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ServiceWindow(self.window_s),)
