from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.contracts.decisions import Settings
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import Seconds
from pointsman.state.trackers.base import Tracker


@dataclass(frozen=True, slots=True)
class Refusal:
    """`retry_after`: engine seconds."""

    reason: RejectReason
    detail: str
    retry_after: Seconds


@dataclass(frozen=True)
class AdmissionPolicy(ABC):
    """A frozen dataclass; its fields are its settings."""

    name: ClassVar[str]

    @abstractmethod
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """Returns the choice, a better one, or a Refusal."""

    def trackers(self) -> tuple[Tracker, ...]:
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
