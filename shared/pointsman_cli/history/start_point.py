"""Start of a fold: the log's first entry or, if retention dropped it, a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import dropwhile

from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman.simulation.replay import BaseState
from pointsman.simulation.replay.folding import fold
from pointsman.state.state import State
from pointsman_cli.history.entries import History, HistoryError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.time_options import Moment, shortly_before

HOLES_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class StartPoint:
    """`known` is None if the fold starts empty. `note`: what is missing."""

    known: BaseState | None
    note: str
    is_blind: bool = False

    @property
    def state(self) -> State | None:
        return self.known.state if self.known is not None else None

    @property
    def start(self) -> Sequence:
        return self.known.state.sequence + 1 if self.known is not None else 1


def beginning_of(history: History, moment: Moment | None = None) -> StartPoint:
    """For a fold up to `moment`. Raises HistoryError."""
    return _noted(_beginning_of(history, moment), history)


def beginning_at(history: History, since: Moment) -> StartPoint:
    """For what happens from `since` on: folded up to there, from the newest checkpoint before it. Raises HistoryError."""
    if since == Moment():
        return beginning_of(history)
    before = since if since.sequence is None else replace(since, sequence=since.sequence - 1)
    known = history.known_before(history.header.last + 1)
    while known is not None and before.is_behind(known.state, history):
        known = history.known_before(known.state.sequence)
    start = StartPoint(known, "") if known is not None else _beginning_of(history, before)
    entries = shown(history, "folding what was before", start.start)
    state = fold(entries, settings=history.settings, until=before.passed(), known=start.state)
    base = BaseState(state, start.known.policies if start.known is not None else policy_set())
    note = "; ".join(filter(None, (start.note, f"from entry {state.sequence + 1:,} on")))
    return _noted(StartPoint(base, note, start.is_blind), history)


def entries_since(history: History, since: Moment, what: str) -> Iterable[LogEntry]:
    """Shown as `what`; without a moment, all."""
    if since == Moment():
        return shown(history, what)
    entries, reached = shown(history, what, shortly_before(history, since)), since.reached()
    return dropwhile(lambda entry: not reached(entry), entries)


def _noted(start: StartPoint, history: History) -> StartPoint:
    holes = history.holes[:HOLES_SHOWN_MAX]
    more = len(history.holes) - len(holes)
    missing = (*holes, f"and {more:,} more such holes") if more else holes
    return replace(start, note="; ".join(filter(None, (start.note, *missing, history.others))))


def _beginning_of(history: History, moment: Moment | None) -> StartPoint:
    first = history.header.first
    if first <= 1:
        return StartPoint(None, "")
    gone = history.begins
    if moment is not None and moment.sequence is not None and moment.sequence < first - 1:
        raise HistoryError(
            f"{gone}; what came before is gone. The recorder's archive may reach further back: name it with --from"
        )
    known = history.known
    if known is None:
        return StartPoint(
            None,
            f"{gone}, and there is no checkpoint that this version can begin with: what was known before is missing"
            + _guess(history),
            is_blind=True,
        )
    as_of = known.state.sequence
    if moment is not None and moment.is_behind(known.state, history):
        return StartPoint(
            None,
            f"{gone}, and its oldest checkpoint is of entry {as_of:,}: what was known before is missing",
            is_blind=True,
        )
    return StartPoint(known, f"{gone}; {beginning_behind(as_of)}")


def beginning_behind(as_of: Sequence) -> str:
    return f"this begins behind entry {as_of:,}, with a checkpoint of what was known then"


def _guess(history: History) -> str:
    if not history.guesses_settings:
        return ""
    settings = history.settings
    return (
        "; no election of a leader is left, so the pool's settings are guessed "
        f"({settings.block_tokens} tokens in a block, speed {settings.speed:g})"
    )
