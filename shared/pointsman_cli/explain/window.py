"""The timeline of a request from the part of a log around it."""

from collections.abc import Iterator

from pointsman.contracts.decisions import is_final_end
from pointsman.contracts.requests import RequestEvent
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId, Sequence
from pointsman_cli.explain.lookup import Found, Read
from pointsman_cli.explain.timeline import timeline_of
from pointsman_cli.explain.values import RequestTimeline
from pointsman_cli.history.entries import History
from pointsman_cli.history.start_point import StartPoint, beginning_behind, beginning_of
from pointsman_cli.history.time_options import Moment

BEFORE_ENTRIES = 2_000
"""The state to begin with is so much older than the request: a leader decides from what it had read by then."""
BEYOND_ENTRIES = 20_000
"""Read behind the end of the request, for the ends of those that were ahead of it."""


class _Window:
    """To be read again and again."""

    def __init__(self, read: Read, start: Sequence, request: RequestId) -> None:
        self._read = read
        self._start = start
        self._request = request

    def __iter__(self) -> Iterator[LogEntry]:
        until: Sequence | None = None
        for entry in self._read(self._start):
            if until is not None and entry.sequence > until:
                return
            event = entry.event
            if isinstance(event, RequestEvent) and event.request == self._request and is_final_end(event):
                until = entry.sequence + BEYOND_ENTRIES
            yield entry


def timeline_around(history: History, found: Found, read: Read) -> RequestTimeline:
    """A checkpoint is folded in the order of the log, where a leader applies its own decisions at once; queues are the
    same soon after, learned factors nearly. Raises HistoryError."""
    known = history.known_before(found.sequence - BEFORE_ENTRIES)
    base = StartPoint(known, beginning_behind(known.state.sequence)) if known is not None else None
    entries = _Window(read, base.start if base is not None else 1, found.request)
    return timeline_of(
        entries,
        found.request,
        history.settings,
        base=base,
        beginning=lambda as_of: beginning_of(history, Moment(sequence=as_of)),
    )
