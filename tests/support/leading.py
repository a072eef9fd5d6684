"""A leader over a fleet that is idle, and what a test has it place."""

from collections.abc import Iterable
from typing import Any

from pointsman.contracts.decisions import RequestPlaced
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import Term
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, route


def leader_of(instances: Iterable[str], policies: PolicySet, *, settings: PoolSettings | None = None) -> Dispatcher:
    state = State(settings or PoolSettings(), policies.trackers())
    for instance in instances:
        state.apply(joined(instance))
    return Dispatcher(state, policies, term=Term(1))


def place(dispatcher: Dispatcher, request: str, keys: list[int], *, now: float = 0.0, **fields: Any) -> RequestPlaced:
    events = dispatcher.route(route(request, keys, arrived_at=now, **fields), now)
    return next(event for event in events if isinstance(event, RequestPlaced))


def prompt(first: int, blocks: int = 16) -> list[int]:
    """Keys of so many blocks, which another prompt shares if it begins with the same ones."""
    return list(range(first, first + blocks))
