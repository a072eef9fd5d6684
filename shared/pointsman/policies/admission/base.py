"""The base class of admission policies."""

from abc import abstractmethod
from dataclasses import dataclass

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.policy import Policy
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import EngineSeconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """`retry_after`: engine seconds."""

    reason: RejectReason
    detail: str
    retry_after: EngineSeconds


@dataclass(frozen=True)
class AdmissionPolicy(Policy):
    @abstractmethod
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """Returns the choice, a better one, or a Refusal."""
