"""What every ordering policy is: settings, frozen, and one method that picks."""

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
    """A frozen dataclass whose fields are its settings. Picks from the pending requests; starves none unless its
    docstring says so."""

    name: ClassVar[str]

    @abstractmethod
    def first(self, queue: InstanceQueue, now: Seconds, state: State) -> Request:
        """The pending request to grant next; the queue has at least one. Reads `state`, changes nothing."""

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers that State shall keep for this policy."""
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
