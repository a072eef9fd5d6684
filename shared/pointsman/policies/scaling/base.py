"""What a scaling policy is asked, and how it answers."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`ready` instances take requests and have answered; `wanted` is what was decided last."""

    ready: int
    wanted: int


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """Wanted instances, and why. `deliberate`: asked for by an operator or a schedule; counts at once and in full."""

    wanted: int
    reason: str
    deliberate: bool = False


@dataclass(frozen=True)
class ScalingPolicy(ABC):
    """A frozen dataclass whose fields are its settings; all have defaults. Seconds are engine time."""

    name: ClassVar[str]

    @abstractmethod
    def scale_target(self, state: State, size: PoolSize, now: Seconds) -> ScaleTarget:
        """Reads `state`, changes nothing."""

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers that `state` must keep for this policy."""
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
