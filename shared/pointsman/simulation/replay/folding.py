"""Folds a log in its own order, as a follower does."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

import msgspec

from pointsman.contracts.decisions import LeaderElected, Settings
from pointsman.contracts.fleet import InstanceJoined
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.primitives import SPEED_MIN, Sequence
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker

FIRST_FOLD_VERSION = 1


@dataclass(frozen=True, slots=True)
class BaseState:
    """Start of a log that lost its beginning: a state in log order, and the policies of its term."""

    state: State
    policies: PolicySet


def fold(
    entries: Iterable[LogEntry],
    *,
    settings: PoolSettings | None = None,
    trackers: Iterable[Tracker] = (),
    until: Callable[[LogEntry], bool] | None = None,
    known: State | None = None,
) -> State:
    """The state after all entries, or before the first for which `until` is true. Without `settings` the entries are
    read twice (`pool_settings`). `known`: initial state; a copy is used."""
    state = State(settings or pool_settings(entries), trackers) if known is None else copy_state(known)
    for entry in entries if known is None else entries_after(known.sequence, entries):
        if until is not None and until(entry):
            break
        state.apply_entry(entry)
    return state


def entries_after(sequence: Sequence, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
    yield from dropwhile(lambda entry: entry.sequence <= sequence, entries)


def copy_state(state: State) -> State:
    copy: State = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    return copy


def pool_settings(entries: Iterable[LogEntry]) -> PoolSettings:
    """From the first LeaderElected, else guessed."""
    return found_pool_settings(entries).settings


class FoundSettings(NamedTuple):
    settings: PoolSettings
    guessed: bool


def found_pool_settings(entries: Iterable[LogEntry]) -> FoundSettings:
    """Guessed from the first instance if there is no LeaderElected; without an instance, the defaults."""
    joined: InstanceJoined | None = None
    for entry in entries:
        event = entry.event
        if isinstance(event, LeaderElected) and _is_usable(event.pool):
            return FoundSettings(recorded_pool_settings(event.pool), guessed=False)
        if joined is None and isinstance(event, InstanceJoined):
            joined = event
    guess = PoolSettings(block_tokens=joined.block_tokens, speed=joined.speed) if joined else PoolSettings()
    return FoundSettings(guess, guessed=True)


def _is_usable(pool: Settings) -> bool:
    try:
        State(recorded_pool_settings(pool))
    except ValueError:
        return False
    return True


def recorded_pool_settings(pool: Settings) -> PoolSettings:
    """Missing settings are defaults, except the fold version, which is then the first. Raises ValueError."""
    settings = msgspec.convert({"fold_version": FIRST_FOLD_VERSION, **pool}, PoolSettings, strict=False)
    if settings.speed < SPEED_MIN or settings.block_tokens < 1:
        raise ValueError("speed and block_tokens must be above 0")
    return settings
