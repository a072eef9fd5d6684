"""Which decisions of the newest term were applied, so that one that stands in the log twice counts once.

A write whose confirmation was lost is sent again, and the server knows it by its message id for two minutes only. Most
second copies would do no harm; but a suspicion that is withdrawn by a report, or a draining that was called off, would
count once more if its copy came behind that. The numbers of a term are dense, so nearly always one number tells all.
"""

from dataclasses import dataclass, field

from pointsman.contracts.envelope import Stamp
from pointsman.primitives import Term

DISORDER_MAX = 20_000
"""Decisions behind a missing one that are remembered singly: more than any window of unconfirmed writes holds. Beyond it
the missing one is taken for lost, and passed over should it come after all."""


@dataclass(slots=True)
class RecentDecisions:
    """The numbers of one term that were applied: 1 to `through`, and those in `beyond`."""

    term: Term = field(default=Term(0))
    through: int = 0
    beyond: set[int] = field(default_factory=set)

    def first_time(self, stamp: Stamp) -> bool:
        """Whether this decision is news. Remembers it."""
        if stamp.term != self.term:
            if stamp.term < self.term:
                return True  # of a term that nobody has declared over: its numbers are not known any more
            self.term, self.through = stamp.term, 0
            self.beyond.clear()
        number = stamp.number
        if number == self.through + 1 and not self.beyond:
            self.through = number
            return True
        if number <= self.through or number in self.beyond:
            return False
        self.beyond.add(number)
        if len(self.beyond) > DISORDER_MAX:
            self.through = min(self.beyond) - 1
        while self.through + 1 in self.beyond:
            self.through += 1
            self.beyond.discard(self.through)
        return True
