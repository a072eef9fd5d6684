from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.primitives import Seconds
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class OrderingPolicy(ABC):
    """A frozen dataclass; its fields are its settings. Must not starve requests unless documented."""

    name: ClassVar[str]

    @abstractmethod
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        """Reads `queue` (not empty) and `state` only."""

    def trackers(self) -> tuple[Tracker, ...]:
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
