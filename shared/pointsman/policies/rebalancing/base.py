"""Plans of migrations; the leader checks each move on its newer State."""

from abc import abstractmethod
from dataclasses import dataclass

from pointsman.policies.policy import Policy
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence
from pointsman.state.state import State


@dataclass(frozen=True, slots=True)
class Migration:
    """`rebind`: abort it in its engine. `benefit`: seconds of TTFT won (Eq. 6)."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: EngineSeconds
    reason: str
    rebind: bool = False


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """`as_of`: log sequence of the State that it was planned on."""

    as_of: Sequence
    migrations: tuple[Migration, ...] = ()
    id: str = ""
    policy: str = ""


@dataclass(frozen=True)
class RebalancingPolicy(Policy):
    @abstractmethod
    def plan(self, state: State, now: EngineSeconds) -> MigrationPlan:
        """Reads `state` only."""
