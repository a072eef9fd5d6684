"""The base of all events: their time and, for decisions, the leader's stamp."""

import msgspec

from pointsman.primitives import Count, Moment, Sequence, Term


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a leader's decision. `number` is dense within `term`, from 1. `as_of`: last log sequence applied
    before it; replay applies the log up to there, then recomputes the decision."""

    term: Term
    number: Count
    as_of: Sequence

    @property
    def order(self) -> tuple[Term, Count]:
        """Grows from each decision to the next."""
        return self.term, self.number


def is_fenced(stamp: Stamp | None, term: Term) -> bool:
    """Whether a leader deposed before `term` (the newest elected) wrote this. Such events do not count."""
    return stamp is not None and stamp.term < term


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    at: Moment
    stamp: Stamp | None = None
