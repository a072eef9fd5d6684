"""Invariants over log entries, shared by torture (a simulated fleet) and faults (a real one). Findings are sentences."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestEnd
from pointsman.contracts.requests import RequestArrived, is_given_up
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId
from pointsman.simulation.replay import verify

SHOWN_MAX = 5


class Entry(Protocol):
    @property
    def event(self) -> LogEvent | None: ...


E = TypeVar("E", bound=Entry)


def arrivals(entries: Iterable[Entry]) -> list[RequestId]:
    return [entry.event.request for entry in entries if isinstance(entry.event, RequestArrived)]


def ends_by_request(entries: Iterable[E]) -> dict[RequestId, list[E]]:
    """The ends of each request. An end by a leader that considered the ingress unresponsive does not count beside
    another."""
    ends: dict[RequestId, list[E]] = defaultdict(list)
    for entry in entries:
        if isinstance(entry.event, RequestEnd):
            ends[entry.event.request].append(entry)
    for request, found in ends.items():
        others = [entry for entry in found if not is_given_up(entry.event)]
        if others and len(found) - len(others) == 1:
            ends[request] = others
    return ends


def missing_decisions(term: int, numbers: Iterable[int]) -> Iterator[str]:
    """A leader numbers its decisions from 1 without a gap."""
    made = set(numbers)
    missing = sorted(set(range(1, max(made, default=0) + 1)) - made)
    yield from listed(f"decisions of term {term} are not in the log", [str(number) for number in missing])


def different_decisions(entries: Sequence[LogEntry], *, complete: bool) -> Iterator[str]:
    """Every decision, recomputed by the production code, is the same. `complete`: each can be recomputed."""
    verdict = verify(entries)
    if complete and (verdict.unchecked or verdict.problems):
        yield f"{verdict}; {dict(verdict.unchecked)} {verdict.problems[:SHOWN_MAX]}"
    for difference in verdict.differences:
        yield (
            f"decision {difference.number} of term {difference.term} at {difference.sequence} was "
            f"{difference.recorded}, and is {difference.recomputed} when recomputed"
        )


def listed(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        yield f"{len(names)} {what}: {', '.join(names[:SHOWN_MAX])}{more}"
