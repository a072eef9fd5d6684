"""The base class of scaling policies."""

from abc import abstractmethod
from dataclasses import dataclass

from pointsman.policies.policy import Policy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`ready` instances take requests; `wanted`: the last decision."""

    ready: int
    wanted: int


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """`deliberate`: set by an operator or a schedule; applies at once and in full."""

    wanted: int
    reason: str
    deliberate: bool = False


@dataclass(frozen=True)
class ScalingPolicy(Policy):
    """Seconds are engine time."""

    @abstractmethod
    def scale_target(self, state: State, size: PoolSize, now: EngineSeconds) -> ScaleTarget:
        """Reads `state` only."""
