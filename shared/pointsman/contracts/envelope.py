"""What every event has in common: when it happened, and, if the leader wrote it, which of its writes it was."""

import msgspec

from pointsman.primitives import Count, Moment, Sequence, Term


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's signature under an event.

    `number` is dense within a `term`, starting at 1. `as_of` is the last log sequence that the leader had
    applied when it wrote the event: replay applies the log up to there before it recomputes the decision.
    """

    term: Term
    number: Count
    as_of: Sequence


def is_fenced(stamp: Stamp | None, term: Term) -> bool:
    """Whether a leader deposed before `term` (the newest elected so far) wrote this. Such an event does not count."""
    return stamp is not None and stamp.term < term


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """Something that happened, at the time it carries (`at`, engine seconds since the Unix epoch)."""

    at: Moment
    stamp: Stamp | None = None
