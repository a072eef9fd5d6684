"""What every admission policy is: settings, frozen, and one method that lets a placement pass, changes or refuses it."""

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
    """Why a request is not admitted, and when asking again may help (engine seconds)."""

    reason: RejectReason
    detail: str
    retry_after: Seconds


@dataclass(frozen=True)
class AdmissionPolicy(ABC):
    """A frozen dataclass whose fields are its settings; all have defaults."""

    name: ClassVar[str]

    @abstractmethod
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """The choice as it is, a better one, or why there is none."""

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers that State shall keep for this policy."""
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)
