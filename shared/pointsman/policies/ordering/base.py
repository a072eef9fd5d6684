"""The base class of ordering policies."""

from abc import abstractmethod
from dataclasses import dataclass

from pointsman.policies.policy import Policy
from pointsman.primitives import EngineSeconds
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request


@dataclass(frozen=True)
class OrderingPolicy(Policy):
    """Must not starve requests unless documented."""

    @abstractmethod
    def first(self, queue: InstanceQueue, now: EngineSeconds, state: State) -> Request:
        """Reads `queue` (not empty) and `state` only."""
