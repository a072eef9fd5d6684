"""The base class of admission policies."""

from abc import abstractmethod
from dataclasses import dataclass

from pointsman.contracts.reasons import RejectReason
from pointsman.policies.policy import Policy
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import NO_SECONDS, EngineSeconds

RETRY_SECONDS_MAX: EngineSeconds = 1e9


@dataclass(frozen=True, slots=True)
class Refusal:
    """`retry_after`: engine seconds, from 0 to RETRY_SECONDS_MAX; what is given is bounded."""

    reason: RejectReason
    detail: str
    retry_after: EngineSeconds

    def __post_init__(self) -> None:
        object.__setattr__(self, "retry_after", min(max(NO_SECONDS, self.retry_after), RETRY_SECONDS_MAX))


@dataclass(frozen=True)
class AdmissionPolicy(Policy):
    @abstractmethod
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        """Returns the choice, a better one, or a Refusal."""
