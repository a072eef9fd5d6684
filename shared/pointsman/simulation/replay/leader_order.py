"""The order in which a leader applied a log. A leader applies its decisions at once and skips them in the log. So a
decision comes right after entry `as_of` of its stamp and after the decision numbered before it. In: entries behind the
LeaderElected of one term; out: `Step`s in that order."""

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.envelope import is_fenced
from pointsman.primitives import Sequence, Term
from pointsman.state.recent_decisions import DISORDER_MAX
from pointsman.state.state import Entry, State

HELD_MAX = 100_000
"""Entries that are held without `held_max` until the next decision tells whether its leader had read them."""


E = TypeVar("E", bound=Entry)


class Kind(Enum):
    DECIDED = auto()
    """A decision of this term, when the leader made it."""
    READ = auto()
    """An entry, when the leader read it; also its own decisions, which it skipped then."""
    REPEATED = auto()
    LOST = auto()
    """A decision after a missing one (`LeaderOrder.hole`). Only without `held_max`."""


class Step(NamedTuple, Generic[E]):
    """`counts`: it may change the state (decodes, not fenced, not applied before)."""

    kind: Kind
    entry: E
    counts: bool = False


class LeaderOrder(Generic[E]):
    """Reorders entries, fed in log order. Without `held_max`, a missing decision ends the order: `hole` has the reason,
    later ones are LOST, as after HELD_MAX entries without a decision one that was made before their end. With it, at most so
    many entries are held, and gaps are skipped."""

    def __init__(self, term: Term, *, held_max: int | None = None) -> None:
        self.term = term
        self.hole = ""
        self._held_max = held_max
        self._held: deque[E] = deque()
        self._early: dict[int, E] = {}
        self._next_number = 1
        self._read_unasked: Sequence = 0
        """Last entry that was read only because HELD_MAX were held."""

    def replay(self, entries: Iterable[E], state: State) -> Iterator[Step[E]]:
        """Yield each step, with `state` before it, then apply it. `entries` begin after `state.sequence`. Until the
        LeaderElected of the term they are applied in log order, as is a `state` in mid-term."""
        elected = state.term >= self.term
        self.resume(state)
        for entry in entries:
            for step in self.feed(entry) if elected else (self._read(entry),):
                yield self._judged(step, state)
                self.apply(step, state)
            elected = elected or (isinstance(entry.event, LeaderElected) and entry.event.term == self.term)
        for step in self.finish():
            yield self._judged(step, state)
            self.apply(step, state)

    def resume(self, state: State) -> None:
        """`state` may be in mid-term."""
        if state.recent_decisions.term == self.term:
            self._next_number = state.recent_decisions.through + 1

    def apply(self, step: Step[E], state: State) -> None:
        entry, event = step.entry, step.entry.event
        if step.kind is Kind.DECIDED and event is not None:
            state.apply(event)
        elif step.kind is Kind.READ and event is not None and self._is_own(event):
            state.skip(entry.sequence)
        elif step.kind is Kind.READ:
            state.apply_entry(entry)

    def feed(self, entry: E) -> Iterator[Step[E]]:
        """Yields the steps that the leader has certainly applied by now."""
        if not self.hole:
            self._held.append(entry)
        if entry.event is not None and self._is_own(entry.event):
            yield from self._decision(entry)
        if self._held_max is not None:
            while len(self._held) > self._held_max:
                yield from self._pass_gap() if self._early else (self._read(self._held.popleft()),)
        elif len(self._held) > HELD_MAX:
            yield from self._read_oldest()

    def finish(self) -> Iterator[Step[E]]:
        while self._early:
            yield from self._missing() if self._held_max is None else self._pass_gap()
        while self._held:
            yield self._read(self._held.popleft())

    def unseen(self, sequence: Sequence) -> int:
        """Entries of others before this one that the leader may not have read."""
        others = (
            entry.event is None or not self._is_own(entry.event) for entry in self._held if entry.sequence < sequence
        )
        return sum(others)

    def _is_own(self, event: LogEvent) -> bool:
        return event.stamp is not None and event.stamp.term == self.term

    def _read(self, entry: E) -> Step[E]:
        return Step(Kind.READ, entry)

    def _judged(self, step: Step[E], state: State) -> Step[E]:
        event = step.entry.event
        if event is None or step.kind in (Kind.REPEATED, Kind.LOST):
            return step
        if step.kind is Kind.READ and self._is_own(event):
            return step
        return step._replace(counts=not is_fenced(event.stamp, state.term))

    def _decision(self, entry: E) -> Iterator[Step[E]]:
        number, as_of = _stamp_of(entry)
        strict = self._held_max is None
        if strict and not self.hole and as_of >= entry.sequence:
            yield from self._stop(
                f"decision {number} of term {self.term} was made on entry {as_of}, which the log has lost"
            )
        elif strict and not self.hole and number >= self._next_number and as_of < self._read_unasked:
            yield from self._stop(
                f"decision {number} of term {self.term} was made on entry {as_of}, more than {HELD_MAX:,} entries before it"
            )
        if self.hole:
            yield Step(Kind.LOST, entry)
        elif number > self._next_number:
            self._early[number] = entry
            if strict and len(self._early) > DISORDER_MAX:
                yield from self._missing()
        elif number == self._next_number:
            yield from self._due(entry)
        else:
            yield Step(Kind.REPEATED, entry)

    def _due(self, entry: E) -> Iterator[Step[E]]:
        due: E | None = entry
        while due is not None:
            number, as_of = _stamp_of(due)
            while self._held and self._held[0].sequence <= as_of:
                yield self._read(self._held.popleft())
            self._next_number = number + 1
            yield Step(Kind.DECIDED, due)
            due = self._early.pop(self._next_number, None)

    def _read_oldest(self) -> Iterator[Step[E]]:
        """A decision that waits for a missing one would be made too late."""
        if self._early:
            yield from self._missing()
        else:
            self._read_unasked = self._held[0].sequence
            yield self._read(self._held.popleft())

    def _pass_gap(self) -> Iterator[Step[E]]:
        yield from self._due(self._early.pop(min(self._early)))

    def _missing(self) -> Iterator[Step[E]]:
        last = min(self._early) - 1
        numbers = (
            f"decision {last} of term {self.term} is"
            if last == self._next_number
            else f"decisions {self._next_number} to {last} of term {self.term} are"
        )
        yield from self._stop(f"{numbers} missing")

    def _stop(self, why: str) -> Iterator[Step[E]]:
        self.hole = why
        lost = list(self._early.values())
        self._early.clear()
        self._held.clear()
        for entry in lost:
            yield Step(Kind.LOST, entry)


def _stamp_of(entry: Entry) -> tuple[int, Sequence]:
    assert entry.event is not None
    assert entry.event.stamp is not None
    return entry.event.stamp.number, entry.event.stamp.as_of
