from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker


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
class ScalingPolicy(ABC):
    """A frozen dataclass; its fields are its settings and have defaults. Engine seconds."""

    name: ClassVar[str]

    @abstractmethod
    def scale_target(self, state: State, size: PoolSize, now: Seconds) -> ScaleTarget:
        """Reads `state` only."""

    def trackers(self) -> tuple[Tracker, ...]:
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
