"""The base class of scaling policies."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pointsman.policies.policy import Policy
from pointsman.policies.scaling.roles import NOT_SIZED, RoleDemand, RoleSizes
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`ready` instances take requests; `wanted`: the last decision. `roles`: of a split pool, and `fixed` of them cannot
    change theirs."""

    ready: int
    wanted: int
    roles: RoleSizes = NOT_SIZED
    fixed: RoleSizes = NOT_SIZED


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """`deliberate`: set by an operator or a schedule; applies at once and in full. `demand`: for which `wanted` is to be
    split; None: in proportion."""

    wanted: int
    reason: str
    deliberate: bool = False
    demand: RoleDemand | None = None


@dataclass(frozen=True)
class ScalingPolicy(Policy):
    """Seconds are engine time."""

    by_date: ClassVar[bool] = False
    """It goes by the date, not by the time that the log has reached."""

    @abstractmethod
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        """Reads `state` only. `now`: by the leader's clock, as the times in `state`; with `by_date` by the scaler's."""
