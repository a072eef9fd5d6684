"""What every routing policy is: settings, frozen, and one method that chooses."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import msgspec

from pointsman.contracts.decisions import Settings
from pointsman.policies.pool_view import CandidateEstimate, PoolView
from pointsman.primitives import InstanceId
from pointsman.state.trackers.base import Tracker


class NoInstance(Exception):  # noqa: N818 - an answer, not a fault
    """No instance can take the request: none is ready, or all that are have failed it."""


class Choice(msgspec.Struct, frozen=True):
    """The instance chosen among those considered, and why."""

    chosen: CandidateEstimate
    reason: str
    considered: list[CandidateEstimate]


@dataclass(frozen=True)
class RoutingPolicy(ABC):
    """A frozen dataclass whose fields are its settings; all have defaults."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, view: PoolView) -> Choice:
        """Where the request should go. Raises NoInstance."""

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers that State shall keep for this policy."""
        return ()

    @property
    def settings(self) -> Settings:
        return asdict(self)


def require_eligible(view: PoolView) -> tuple[InstanceId, ...]:
    """The eligible instances. Raises NoInstance where there is none."""
    if not view.eligible:
        able = f"instance{_needs(view)}"
        reason = f"every ready {able} failed this request" if view.retried else f"no {able} is ready"
        raise NoInstance(reason)
    return view.eligible


def _needs(view: PoolView) -> str:
    """What the request needs that not every instance has."""
    request = view.request
    if request.adapter:
        return f" with the adapter {request.adapter}"
    if request.alias:
        return f" that answers to {request.alias}"
    return f" with room for {request.context_tokens} tokens" if view.some_ready and request.context_tokens else ""


def candidates_of(view: PoolView) -> list[CandidateEstimate]:
    """All candidates. Raises NoInstance where there is none."""
    require_eligible(view)
    return view.candidates
