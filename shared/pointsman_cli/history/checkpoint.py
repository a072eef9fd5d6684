"""Checkpoints of logs that lost their beginning; used only if proven to be of this log and this version's fold."""

from collections.abc import Iterable
from contextlib import closing

import msgspec

from pointsman.contracts.decisions import LeaderElected, RequestPlaced, RequestRejected
from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, policy_set, recorded_policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest
from pointsman.simulation.replay import BaseState
from pointsman.state.checkpoint import UnreadableStateError, decode_state, encode_state
from pointsman.state.state import State
from pointsman_cli.history.entries import History


class ExportedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    as_of: Sequence
    entry: str
    form: str
    content: bytes


def proven(history: History, kept: ExportedCheckpoint) -> BaseState | None:
    """The checkpoint's state; None if it is of another log or fold. Raises HistoryError."""
    with closing(history.entries(kept.as_of)) as entries:
        entry = next(entries, None)
        if entry is None or entry.sequence != kept.as_of or entry_digest(entry) != kept.entry:
            return None
        return restored(kept.content, kept.form, entries)


def restored(content: bytes, form: str, following: Iterable[LogEntry] = ()) -> BaseState | None:
    """A checkpoint's state; None if it is unreadable or of another fold. `following`: entries behind it."""
    try:
        state = decode_state(content)
        policies = _policies_of(state, following)
    except (UnreadableStateError, UnknownPolicyError):
        return None
    return BaseState(state, policies) if _form(state, policies) == form else None


def kept_from(history: History, known: BaseState) -> ExportedCheckpoint | None:
    """The checkpoint to export; None if its entry is gone. Raises HistoryError."""
    as_of = known.state.sequence
    with closing(history.entries(as_of)) as entries:
        entry = next(entries, None)
    if entry is None or entry.sequence != as_of:
        return None
    form = _form(known.state, known.policies)
    return ExportedCheckpoint(as_of=as_of, entry=entry_digest(entry), form=form, content=encode_state(known.state))


def _form(state: State, policies: PolicySet) -> str:
    return checkpoint_form(State(state.settings, policies.trackers()))


def _policies_of(state: State, entries: Iterable[LogEntry]) -> PolicySet:
    """Of the term, else the next that `entries` tell, else the defaults. Raises UnknownPolicyError."""
    if state.term_settings:
        return recorded_policy_set(state.term_policy, state.term_settings)
    for entry in entries:
        if isinstance(entry.event, LeaderElected | RequestPlaced | RequestRejected) and entry.event.settings:
            return recorded_policy_set(entry.event.policy, entry.event.settings)
    return policy_set()
