"""Decides the size of the pool. In: State. Out: the policy's target within its limits, as ScaleDecided."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.decisions import ScaleDecided
from pointsman.policies.scaling import Limits, PoolSize, ScaleTarget, ScalingPolicy, limited
from pointsman.primitives import EngineSeconds, Sequence
from pointsman.state.fleet import Instance, Status
from pointsman.state.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """`dropped`: entries the log lost before the State's; a lost decision's number is at most that."""

    policy: ScalingPolicy
    limits: Limits
    scaler: str
    dropped: Callable[[], Sequence] = lambda: 0

    def decide(self, state: State, now: EngineSeconds) -> ScaleDecided | None:
        wanted = state.scaling.wanted
        if wanted is None:
            return self.decision(state, self._first_target(state), now)
        if state.fleet.split:
            return None  # prefill and decode instances do not replace each other: operators size such a pool
        target = self.policy.scale_target(state, PoolSize(ready=len(in_service(state)), wanted=wanted), now)
        found = limited(target, state.scaling, now, self.limits)
        return self.decision(state, found, now) if found else None

    def operator_decision(
        self, state: State, wanted: int, *, asker: str, actor: str, now: EngineSeconds
    ) -> ScaleDecided:
        return self.decision(state, ScaleTarget(wanted, f"{asker or 'somebody'} asked for {wanted}"), now, by=actor)

    def repeated(self, state: State, now: EngineSeconds) -> ScaleDecided | None:
        """Repeats the newest decision for a log that is about to drop it."""
        newest = state.scaling.decided
        return self.decision(state, ScaleTarget(newest.wanted, newest.reason), now, by=newest.by) if newest else None

    def bounds_refusal(self, wanted: int) -> str:
        """Why the pool cannot have this size, or ""."""
        limits = self.limits
        if limits.lowest <= wanted <= limits.highest:
            return ""
        return f"this scaler keeps from {limits.lowest} to {limits.highest} instances"

    def decision(self, state: State, target: ScaleTarget, now: EngineSeconds, *, by: str = "") -> ScaleDecided:
        return ScaleDecided(
            at=now,
            policy=self.policy.name,
            settings=self.policy.settings,
            current=len(in_service(state)),
            wanted=target.wanted,
            reason=target.reason,
            number=max(state.scaling.highest_number, self.dropped()) + 1,
            scaler=self.scaler,
            by=by,
        )

    def _first_target(self, state: State) -> ScaleTarget:
        """At least one: only a running engine reports its model."""
        present = sum(not instance.draining for instance in state.fleet.instances)
        wanted = max(1, min(max(present, self.limits.lowest), self.limits.highest))
        return ScaleTarget(wanted, f"the first decision of this pool: {present} are there")


def in_service(state: State) -> list[Instance]:
    """Instances that take requests and have answered since they joined."""
    return [i for i in state.fleet.instances if i.status is Status.READY and i.answered]
