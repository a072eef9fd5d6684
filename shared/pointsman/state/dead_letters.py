"""Log entries that had no effect, because nobody can read them or because the fold failed on them.

They are passed over by everyone alike, and counted, so that `doctor` can tell of them from any fold of the log.
"""

from dataclasses import dataclass, field

from pointsman.primitives import Sequence

NEWEST_MAX = 20


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry. `what`: its subject where it does not decode, else the type of its event. `sequence` is 0 for a decision
    that its leader applied before it was logged."""

    sequence: Sequence
    what: str
    reason: str
    decoded: bool


@dataclass(slots=True)
class DeadLetters:
    """Counts of all, and the NEWEST_MAX last ones, oldest first."""

    undecodable: int = 0
    unapplied: int = 0
    newest: list[DeadLetter] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.undecodable + self.unapplied

    def add(self, letter: DeadLetter) -> None:
        if letter.decoded:
            self.unapplied += 1
        else:
            self.undecodable += 1
        self.newest.append(letter)
        del self.newest[:-NEWEST_MAX]
