"""Deduplicates decisions of the newest term. A write without confirmation is sent again, and the server deduplicates
for two minutes only. Numbers of a term are dense, so one number nearly always suffices.

A worker may write on its instance's subject, also forged decisions about it. Hence a number that such a decision took is
still new for decisions about anything else."""

from dataclasses import dataclass, field

from pointsman.contracts.envelope import Event, Stamp
from pointsman.contracts.fleet import FleetEvent
from pointsman.primitives import InstanceId, Term

DISORDER_MAX = 20_000
"""Decisions remembered behind a missing one: more than a write window. Beyond it the missing one counts as lost."""

CLAIMS_MAX = DISORDER_MAX // 2
"""Numbers taken by decisions about instances that are remembered with their instance, and how far ahead one may be. The
number of any other is not remembered."""


@dataclass(slots=True)
class RecentDecisions:
    """Applied numbers: 1 to `through`, and those in `beyond`. `claims`: which instance's decision took the number."""

    term: Term = field(default=Term(0))
    through: int = 0
    beyond: set[int] = field(default_factory=set)
    claims: dict[int, InstanceId] = field(default_factory=dict)

    def is_news(self, event: Event, elected: Term) -> bool:
        """`elected`: the newest term, 0 if not known. No leader decides in a later one, so its numbers do not count."""
        stamp = event.stamp
        if stamp is None or stamp.term > elected > 0:
            return True
        return self.first_time(stamp, event.instance if isinstance(event, FleetEvent) else None)

    def first_time(self, stamp: Stamp, instance: InstanceId | None = None) -> bool:
        """`instance`: whose worker may write on the subject of this decision."""
        if stamp.term != self.term:
            if stamp.term < self.term:
                return True  # its numbers are forgotten
            self.term, self.through = stamp.term, 0
            self.beyond.clear()
            self.claims.clear()
        number = stamp.number
        if instance is not None:
            return self._claim(number, instance)
        self._forget_claims(number - CLAIMS_MAX)
        return self._is_new(number) or self.claims.pop(number, None) is not None

    def _claim(self, number: int, instance: InstanceId) -> bool:
        claimed = self.claims.get(number)
        if claimed is None:
            if len(self.claims) >= CLAIMS_MAX or 0 < self.through < number - CLAIMS_MAX:
                return True
            if not self._is_new(number):
                return False
        self.claims[number] = instance
        return claimed != instance

    def _forget_claims(self, through: int) -> None:
        while self.claims and (oldest := next(iter(self.claims))) <= through:
            del self.claims[oldest]

    def _is_new(self, number: int) -> bool:
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
