"""A log folded in its own order, as a follower sees it."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile

import msgspec

from pointsman.contracts.decisions import LeaderElected, Settings
from pointsman.contracts.fleet import InstanceJoined
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.primitives import SPEED_MIN, Sequence
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker

FIRST_FOLD_VERSION = 1
"""Of leaders that do not say by which rules they folded."""


@dataclass(frozen=True, slots=True)
class BaseState:
    """Where to begin with a log that has lost its beginning: what a fold of it knew, and the policies of the term then."""

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
    """The state after all entries, or after those before the first of which `until` is true.

    Without `settings` the entries are read twice: the log names them itself (`pool_settings`). `known`: what entries
    that are gone have left, to go on from; it needs no `settings`.
    """
    state = State(settings or pool_settings(entries), trackers) if known is None else copy_state(known)
    for entry in entries if known is None else entries_after(known.sequence, entries):
        if until is not None and until(entry):
            break
        apply_entry(state, entry)
    return state


def entries_after(sequence: Sequence, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
    """Without those up to this one. `entries` are not touched before the first is asked for."""
    yield from dropwhile(lambda entry: entry.sequence <= sequence, entries)


def copy_state(state: State) -> State:
    """A state of the caller's own."""
    copy: State = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
    return copy


def apply_entry(state: State, entry: LogEntry) -> None:
    """Apply one entry in log order; what does not decode is passed over, as everybody did who followed the log."""
    if entry.event is None:
        state.skip(entry.sequence, subject=entry.subject, problem=entry.problem)
    else:
        state.apply(entry.event, entry.sequence)


def pool_settings(entries: Iterable[LogEntry]) -> PoolSettings:
    """What the fold of this log must be told: as its first leader says, else what the first instance lets guess."""
    joined: InstanceJoined | None = None
    for entry in entries:
        event = entry.event
        if isinstance(event, LeaderElected) and _is_usable(event.pool):
            return recorded_pool_settings(event.pool)
        if joined is None and isinstance(event, InstanceJoined):
            joined = event
    return PoolSettings(block_tokens=joined.block_tokens, speed=joined.speed) if joined else PoolSettings()


def _is_usable(pool: Settings) -> bool:
    """Whether a State can be made with these settings."""
    try:
        State(recorded_pool_settings(pool))
    except ValueError:
        return False
    return True


def recorded_pool_settings(pool: Settings) -> PoolSettings:
    """The settings that a LeaderElected carries; those that it does not name are at their defaults, but for the version of
    the fold: a leader that does not name it knew only the first. Raises ValueError."""
    settings = msgspec.convert({"fold_version": FIRST_FOLD_VERSION, **pool}, PoolSettings, strict=False)
    if settings.speed < SPEED_MIN or settings.block_tokens < 1:
        msg = "speed and block_tokens must be above 0"
        raise ValueError(msg)
    return settings
