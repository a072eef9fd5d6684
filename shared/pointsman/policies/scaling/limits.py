"""Bounds, steps and pauses of every scaling policy. Pools grow fast and shrink slowly."""

from dataclasses import dataclass

from pointsman.policies.scaling.base import ScaleTarget
from pointsman.primitives import EngineSeconds
from pointsman.state.scaling import Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Engine seconds. `step_up`, `step_down`: instances per decision."""

    lowest: int = 1
    highest: int = 8
    step_up: int = 2
    step_down: int = 1
    pause_up_s: EngineSeconds = 30.0
    pause_down_s: EngineSeconds = 60.0


def limited(target: ScaleTarget, scaling: Scaling, now: EngineSeconds, limits: Limits) -> ScaleTarget | None:
    before = scaling.wanted
    bounded = min(max(target.wanted, limits.lowest), limits.highest)
    if before is None:
        return ScaleTarget(bounded, target.reason, target.deliberate)
    outside = min(max(before, limits.lowest), limits.highest)
    if outside != before:
        return ScaleTarget(outside, f"{before} is outside {limits.lowest} to {limits.highest}", deliberate=True)
    if bounded == before:
        return None
    if target.deliberate:
        return ScaleTarget(bounded, target.reason, deliberate=True)
    changed_at = scaling.changed_at(now)
    if bounded > before:
        if now - changed_at.up < limits.pause_up_s:
            return None
        return ScaleTarget(min(bounded, before + limits.step_up), target.reason)
    if now - max(changed_at.up, changed_at.down) < limits.pause_down_s:
        return None
    return ScaleTarget(max(bounded, before - limits.step_down), target.reason)
