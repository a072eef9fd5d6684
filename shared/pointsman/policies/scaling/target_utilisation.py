"""Keeps prefill time and KV memory near a target. Source: Kubernetes' horizontal autoscaler, `ceil(ready * measured /
target)` with a tolerance; the busier resource counts. Bias: ignores SLOs; late in bursts."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.policies.scaling.demand import prefill_demand
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.service_window import ServiceWindow


@dataclass(frozen=True)
class TargetUtilisation(ScalingPolicy):
    """`prefill`, `kv`: target shares. `tolerance`: relative."""

    name: ClassVar[str] = "target_utilisation"

    prefill: float = 0.6
    kv: float = 0.8
    window_s: EngineSeconds = 60.0
    tolerance: float = 0.1

    @override
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        if not size.ready:
            return ScaleTarget(max(size.wanted, 1), "no instance is ready")
        prefills = state.tracker(ServiceWindow).prefills(now - self.window_s)
        busy = prefill_demand(state, prefills) / self.window_s / size.ready
        ready = [instance for instance in state.fleet.instances if instance.id in state.fleet.ready]
        full = sum(instance.kv_usage for instance in ready) / len(ready) if ready else 0.0
        measured = f"prefill is {busy:.0%} in use of {self.prefill:.0%}, KV memory {full:.0%} of {self.kv:.0%}"
        ratio = max(busy / self.prefill, full / self.kv)
        if abs(ratio - 1) <= self.tolerance or (ratio > 1 and size.ready < size.wanted):
            return ScaleTarget(size.wanted, measured)
        return ScaleTarget(max(1, ceil(size.ready * ratio)), measured)

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ServiceWindow(self.window_s),)
