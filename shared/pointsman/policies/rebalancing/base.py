"""Plans of migrations: immutable values; the leader checks each move against newer knowledge."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.primitives import InstanceId, RequestId, Seconds, Sequence
from pointsman.state.state import State


@dataclass(frozen=True, slots=True)
class Migration:
    """A pending request that should wait at `target`; with `rebind`, one to take out of its engine. `benefit`: seconds
    of TTFT won (Eq. 6)."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: Seconds
    reason: str
    rebind: bool = False


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Migrations by descending benefit, planned on the state as of a log sequence. `id`, `policy`: of a rebalancer's
    plan, for the log."""

    as_of: Sequence
    migrations: tuple[Migration, ...] = ()
    id: str = ""
    policy: str = ""


@dataclass(frozen=True)
class RebalancingPolicy(ABC):
    """A frozen dataclass whose fields are its settings; all have defaults."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, state: State, now: Seconds) -> MigrationPlan:
        """What should move now; empty where nothing should. Reads `state`, changes nothing."""

    @property
    def settings(self) -> Settings:
        return asdict(self)
