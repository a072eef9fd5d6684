"""Decides the size of the pool and, in a split pool, of each role. In: State. Out: the policy's target within its
limits, as ScaleDecided."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.decisions import ScaleDecided
from pointsman.policies.scaling.base import PoolSize, ScaleTarget, ScalingPolicy
from pointsman.policies.scaling.limits import Limits, limited
from pointsman.policies.scaling.roles import (
    NOT_SIZED,
    RoleDemand,
    RoleSizes,
    best_split,
    better_split,
    fixed_sizes,
    in_proportion,
    present_sizes,
    staying,
)
from pointsman.primitives import EngineSeconds, Sequence
from pointsman.state.fleet import Instance, Status
from pointsman.state.scaling import Scaling
from pointsman.state.state import State

SWITCH_PAUSE_SECONDS: EngineSeconds = 10.0
"""Between two changes of roles, and after a change of size. A switch costs a drain only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """`dropped`: entries the log lost before the State's; a lost decision's number is at most that. `first_roles`: of a
    pool that is to be split from its beginning."""

    policy: ScalingPolicy
    limits: Limits
    scaler: str
    dropped: Callable[[], Sequence] = lambda: 0
    first_roles: RoleSizes = NOT_SIZED

    def decide(self, state: State, now: EngineSeconds, *, absent: int = 0) -> ScaleDecided | None:
        """`absent`: instances that run and have not joined, or not again after the log was lost."""
        wanted = state.scaling.wanted
        if wanted is None:
            return self._first_decision(state, now, absent)
        roles = wanted_roles(state)
        size = PoolSize(ready=len(in_service(state)), wanted=wanted, roles=roles, fixed=fixed_sizes(state.fleet))
        target = self.policy.scale_target(state, size, now)
        found = limited(target, state.scaling, now, self.limits)
        if state.fleet.split and not roles.total:
            return None  # instances that cannot change their role do not replace each other: operators size this pool
        total = found.wanted if found else wanted
        split = self._split(size, total, target.demand, state.scaling, now)
        if found is None and split == roles:
            return None
        return self.decision(state, found or ScaleTarget(wanted, target.reason), now, roles=split)

    def operator_decision(
        self, state: State, wanted: int, *, asker: str, actor: str, now: EngineSeconds, roles: RoleSizes = NOT_SIZED
    ) -> ScaleDecided:
        asked = f"{roles.prefill} to prefill and {roles.decode} to decode" if roles.total else str(wanted)
        target = ScaleTarget(wanted, f"{asker or 'somebody'} asked for {asked}")
        return self.decision(
            state, target, now, by=actor, roles=roles if roles.total else in_proportion(wanted_roles(state), wanted)
        )

    def repeated(self, state: State, now: EngineSeconds) -> ScaleDecided | None:
        """Repeats the newest decision for a log that is about to drop it."""
        newest = state.scaling.decided
        if newest is None:
            return None
        roles = RoleSizes(newest.prefill, newest.decode)
        return self.decision(state, ScaleTarget(newest.wanted, newest.reason), now, by=newest.by, roles=roles)

    def bounds_refusal(self, wanted: int) -> str:
        """Why the pool cannot have this size, or ""."""
        limits = self.limits
        if limits.lowest <= wanted <= limits.highest:
            return ""
        return f"this scaler keeps from {limits.lowest} to {limits.highest} instances"

    def decision(
        self,
        state: State,
        target: ScaleTarget,
        now: EngineSeconds,
        *,
        by: str = "",
        roles: RoleSizes = NOT_SIZED,
    ) -> ScaleDecided:
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
            prefill=roles.prefill,
            decode=roles.decode,
        )

    def _split(
        self, size: PoolSize, total: int, demand: RoleDemand | None, scaling: Scaling, now: EngineSeconds
    ) -> RoleSizes:
        roles = size.roles
        if not roles.total:
            return NOT_SIZED
        if total != roles.total:
            return in_proportion(roles, total) if demand is None else best_split(demand, total, size.fixed)
        if demand is None or now - max(scaling.changed_at(now)) < SWITCH_PAUSE_SECONDS:
            return roles
        return better_split(demand, roles, size.fixed, step=self.limits.step_up)

    def _first_decision(self, state: State, now: EngineSeconds, absent: int) -> ScaleDecided:
        """At least one: only a running engine reports its model."""
        present = len(staying(state.fleet)) + absent
        wanted = max(1, min(max(present, self.limits.lowest, self.first_roles.total), self.limits.highest))
        target = ScaleTarget(wanted, f"the first decision of this pool: {present} are there")
        roles = present_sizes(state.fleet) if present == wanted and not absent else NOT_SIZED
        if self.first_roles.total:
            roles = in_proportion(self.first_roles, wanted)
        return self.decision(state, target, now, roles=roles)


def wanted_roles(state: State) -> RoleSizes:
    """As decided, else as they are."""
    decided = state.scaling.decided
    if decided is not None and decided.prefill + decided.decode == decided.wanted:
        return RoleSizes(decided.prefill, decided.decode)
    present = present_sizes(state.fleet)
    return present if present.prefill and present.decode and present.total == state.scaling.wanted else NOT_SIZED


def in_service(state: State) -> list[Instance]:
    """Instances that take requests and have answered since they joined."""
    return [i for i in state.fleet.instances if i.status is Status.READY and i.answered]
