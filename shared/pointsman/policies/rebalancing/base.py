"""Plans of migrations; the leader checks each move on its newer State."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.primitives import InstanceId, RequestId, Seconds, Sequence
from pointsman.state.state import State


@dataclass(frozen=True, slots=True)
class Migration:
    """`rebind`: abort it in its engine. `benefit`: seconds of TTFT won (Eq. 6)."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: Seconds
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
class RebalancingPolicy(ABC):
    """A frozen dataclass; its fields are its settings and have defaults."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, state: State, now: Seconds) -> MigrationPlan:
        """Reads `state` only."""

    @property
    def settings(self) -> Settings:
        return asdict(self)
