"""When the pool shall have another size: the policy's wish within its limits, as an event for the log."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.decisions import ScaleDecided
from pointsman.policies.scaling import Limits, PoolSize, ScaleTarget, ScalingPolicy, limited
from pointsman.primitives import Seconds, Sequence
from pointsman.state.fleet import Instance, Status
from pointsman.state.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """One scaler's way to decide. It remembers nothing: what was decided before is in the State.

    `dropped`: how many entries the log has lost before those in the State. There may be decisions among them, and none has
    a higher number than its entry.
    """

    policy: ScalingPolicy
    limits: Limits
    scaler: str
    dropped: Callable[[], Sequence] = lambda: 0

    def decide(self, state: State, now: Seconds) -> ScaleDecided | None:
        """What to write now; None where the size stays."""
        wanted = state.scaling.wanted
        if wanted is None:
            return self.decision(state, self._first_wish(state), now)
        if state.fleet.split:
            return None  # who prefills and who decodes cannot stand in for each other: people size such a pool
        wish = self.policy.wish(state, PoolSize(ready=len(in_service(state)), wanted=wanted), now)
        found = limited(wish, state.scaling, now, self.limits)
        return self.decision(state, found, now) if found else None

    def asked(self, state: State, wanted: int, asker: str, now: Seconds) -> ScaleDecided:
        """The decision of a person."""
        return self.decision(state, ScaleTarget(wanted, f"{asker or 'somebody'} asked for {wanted}"), now)

    def again(self, state: State, now: Seconds) -> ScaleDecided | None:
        """The newest decision once more, for a log that is about to lose it."""
        newest = state.scaling.decided
        return self.decision(state, ScaleTarget(newest.wanted, newest.reason), now) if newest else None

    def outside(self, wanted: int) -> str:
        """Why the pool cannot have this size, or nothing."""
        limits = self.limits
        if limits.lowest <= wanted <= limits.highest:
            return ""
        return f"this scaler keeps from {limits.lowest} to {limits.highest} instances"

    def decision(self, state: State, wish: ScaleTarget, now: Seconds) -> ScaleDecided:
        return ScaleDecided(
            at=now,
            policy=self.policy.name,
            settings=self.policy.settings,
            current=len(in_service(state)),
            wanted=wish.wanted,
            reason=wish.reason,
            number=max(state.scaling.highest_number, self.dropped()) + 1,
            scaler=self.scaler,
        )

    def _first_wish(self, state: State) -> ScaleTarget:
        """What is there, within the bounds, but one at least: only a running engine tells which model it serves."""
        there = sum(not instance.draining for instance in state.fleet.instances)
        wanted = max(1, min(max(there, self.limits.lowest), self.limits.highest))
        return ScaleTarget(wanted, f"the first decision of this pool: {there} are there")


def in_service(state: State) -> list[Instance]:
    """Instances that count as capacity: they take requests, and have answered since they joined."""
    return [i for i in state.fleet.instances if i.status is Status.READY and i.answered]
