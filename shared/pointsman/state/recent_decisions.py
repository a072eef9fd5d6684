"""Deduplicates decisions of the newest term. A write without confirmation is sent again, and the server deduplicates
for two minutes only. Numbers of a term are dense, so one number nearly always suffices."""

from dataclasses import dataclass, field

from pointsman.contracts.envelope import Stamp
from pointsman.primitives import Term

DISORDER_MAX = 20_000
"""Decisions remembered behind a missing one: more than a write window. Beyond it the missing one counts as lost."""


@dataclass(slots=True)
class RecentDecisions:
    """Applied numbers: 1 to `through`, and those in `beyond`."""

    term: Term = field(default=Term(0))
    through: int = 0
    beyond: set[int] = field(default_factory=set)

    def first_time(self, stamp: Stamp) -> bool:
        if stamp.term != self.term:
            if stamp.term < self.term:
                return True  # its numbers are forgotten
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
