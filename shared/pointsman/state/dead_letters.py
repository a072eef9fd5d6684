"""Log entries without effect: they did not decode, or the fold failed on them. Equal for every reader of the log."""

from dataclasses import dataclass, field

from pointsman.primitives import Sequence

NEWEST_MAX = 20


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`what`: the subject if it did not decode, else the event's type. `sequence`: 0 for a decision not logged yet."""

    sequence: Sequence
    what: str
    reason: str
    decoded: bool


@dataclass(slots=True)
class DeadLetters:
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
