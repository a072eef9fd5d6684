"""The base class of routing policies."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.policy import Policy
from pointsman.policies.pool_view import PoolView
from pointsman.primitives import InstanceId, Tokens


class NoInstance(Exception):  # noqa: N818 - an answer, not a fault
    """None is ready, or all ready ones failed the request."""


class Choice(msgspec.Struct, frozen=True):
    chosen: CandidateEstimate
    reason: str
    considered: Sequence[CandidateEstimate]
    best_effort: bool = False
    """Admitted although its prompt alone exceeds the SLO."""


@dataclass(frozen=True)
class RoutingPolicy(Policy):
    rule: ClassVar[str]
    """How it chooses: a sentence that begins with its name, for `explain` where an instance that it did not choose was
    predicted to be sooner."""

    @abstractmethod
    def choose(self, view: PoolView) -> Choice:
        """Raises NoInstance."""


def require_eligible(view: PoolView) -> tuple[InstanceId, ...]:
    """Raises NoInstance."""
    if not view.eligible:
        able = f"instance{_needs(view)}"
        raise NoInstance(f"every ready {able} failed this request" if view.retried else f"no {able} is ready")
    return view.eligible


def _needs(view: PoolView) -> str:
    request = view.request
    if request.adapter:
        return f" with the adapter {request.adapter}"
    if request.alias:
        return f" that answers to {request.alias}"
    return f" with room for {request.context_tokens} tokens" if view.some_ready and request.context_tokens else ""


def candidates_of(view: PoolView) -> list[CandidateEstimate]:
    """Raises NoInstance."""
    require_eligible(view)
    return view.candidates


def load_of(candidate: CandidateEstimate) -> tuple[Tokens, int]:
    """Uncached tokens without a first token, then requests."""
    return candidate.queued_tokens, candidate.requests


def least_loaded(view: PoolView, candidates: Sequence[CandidateEstimate]) -> CandidateEstimate:
    """By `load_of`; of equals the familiar one."""
    least = min(map(load_of, candidates))
    return view.familiar([candidate for candidate in candidates if load_of(candidate) == least])
