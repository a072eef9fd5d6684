"""Decides the size of the pool and, in a split pool, of each role. In: State. Out: the policy's target within its
limits, as ScaleDecided."""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
SPLIT_SIZE_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """`dropped`: entries the log lost before the State's; a lost decision's number is at most that. `first_roles`: of a
    pool that is to be split, until other roles are decided."""

    policy: ScalingPolicy
    limits: Limits
    scaler: str
    dropped: Callable[[], Sequence] = lambda: 0
    first_roles: RoleSizes = NOT_SIZED

    def decide(self, state: State, now: EngineSeconds, *, absent: int = 0, unreplaced: int = 0) -> ScaleDecided | None:
        """`absent`: instances that run and have not joined, or not again after the log was lost. `unreplaced`: instances that
        take no requests and stay; the pool has them beside what the policy wants, which would wait for them for ever."""
        wanted = state.scaling.wanted
        if wanted is None:
            return self._first_decision(state, now, absent)
        roles = wanted_roles(state)
        ready = len(in_service(state))
        beside = min(unreplaced, max(0, wanted - ready))
        size = PoolSize(ready=ready, wanted=wanted - beside, roles=roles, fixed=fixed_sizes(state.fleet))
        target = self.policy.scale_target(state, size, now)
        if beside:
            reason = f"{target.reason}; {beside} more take no requests"
            target = replace(target, wanted=target.wanted + beside, reason=reason)
        found = limited(target, state.scaling, now, self.limits)
        proportion = self._proportion(state)
        if wanted and state.fleet.split and not proportion.total:
            return None  # instances that cannot change their role do not replace each other: operators size this pool
        found = self._with_both_roles(found or ScaleTarget(wanted, target.reason), target, proportion)
        split = self._split(replace(size, roles=proportion), found.wanted, target.demand, state.scaling, now)
        if found.wanted == wanted and (split == roles or not wanted):
            return None
        return self.decision(state, found, now, roles=split)

    def operator_decision(
        self, state: State, wanted: int, *, asker: str, actor: str, now: EngineSeconds, roles: RoleSizes = NOT_SIZED
    ) -> ScaleDecided:
        asked = f"{roles.prefill} to prefill and {roles.decode} to decode" if roles.total else str(wanted)
        target = ScaleTarget(wanted, f"{asker or 'somebody'} asked for {asked}")
        if not roles.total:
            roles = _resized(self._proportion(state), wanted)
        return self.decision(state, target, now, by=actor, roles=roles)

    def repeated(self, state: State, now: EngineSeconds) -> ScaleDecided | None:
        """Repeats the newest decision for a log that is about to drop it."""
        newest = state.scaling.decided
        if newest is None:
            return None
        roles = RoleSizes(newest.prefill, newest.decode)
        return self.decision(state, ScaleTarget(newest.wanted, newest.reason), now, by=newest.by, roles=roles)

    def size_refusal(self, state: State, wanted: int) -> str:
        """Why the pool cannot have this size, or ""."""
        limits = self.limits
        if not limits.lowest <= wanted <= limits.highest:
            return f"this scaler keeps from {limits.lowest} to {limits.highest} instances"
        if 0 < wanted < SPLIT_SIZE_MIN and self._proportion(state).total:
            return "each role of a split pool needs at least one instance: ask for 2 or more"
        return ""

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

    def _proportion(self, state: State) -> RoleSizes:
        """In which the pool is split; NOT_SIZED: it is not, or operators do it."""
        for roles in (wanted_roles(state), _roles_before_sleep(state), self.first_roles):
            if roles.total:
                return roles
        present = present_sizes(state.fleet)
        if (state.scaling.wanted or 0) < SPLIT_SIZE_MIN and present.total == len(staying(state.fleet)) > 0:
            return RoleSizes(max(1, present.prefill), max(1, present.decode))
        return NOT_SIZED

    def _with_both_roles(self, found: ScaleTarget, target: ScaleTarget, proportion: RoleSizes) -> ScaleTarget:
        """One instance cannot have both roles of a split pool."""
        if found.wanted != 1 or not proportion.total or self.limits.highest < SPLIT_SIZE_MIN:
            return found
        if target.wanted == 0 and self.limits.lowest == 0:
            return replace(found, wanted=0)
        return replace(found, wanted=SPLIT_SIZE_MIN, reason=f"{found.reason}; each role needs an instance")

    def _split(
        self, size: PoolSize, total: int, demand: RoleDemand | None, scaling: Scaling, now: EngineSeconds
    ) -> RoleSizes:
        roles = size.roles
        if not roles.total:
            return NOT_SIZED
        if total != roles.total:
            best = NOT_SIZED if demand is None else best_split(demand, total, size.fixed)
            return best if best.total else _resized(roles, total)
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


def _roles_before_sleep(state: State) -> RoleSizes:
    decided = state.scaling.decided
    return NOT_SIZED if decided is None or decided.wanted else RoleSizes(decided.prefill, decided.decode)


def _resized(roles: RoleSizes, total: int) -> RoleSizes:
    """A pool that is to sleep keeps its roles for when it wakes."""
    return in_proportion(roles, total) if total else roles


def in_service(state: State) -> list[Instance]:
    """Instances that take requests and have answered since they joined."""
    return [i for i in state.fleet.instances if i.status is Status.READY and i.answered]
