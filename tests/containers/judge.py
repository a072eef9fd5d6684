"""Judges one fault on a fleet in containers: 0 lost, 0 doubled, and nobody failed without an excuse. The checks of
`pointsman-lab faults`, on the log since the fault's first request, and two more."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pointsman.contracts.requests import RequestAttemptFailed
from pointsman.primitives import EngineSeconds, RequestId
from pointsman_lab.faults import checks
from pointsman_lab.faults.clients import Exchange
from pointsman_lab.faults.observations import Evidence
from pointsman_lab.invariants import listed

Check = Callable[[Evidence], Iterator[str]]

CLIENTS: tuple[Check, ...] = (checks.every_request_got_one_answer, checks.clients_and_log_tell_the_same)
WHOLE: tuple[Check, ...] = (
    checks.the_log_is_whole,
    checks.nothing_is_left_over,
    checks.index_equals_engines,
    checks.the_archive_holds_the_log,
)


@dataclass(slots=True)
class Row:
    """A row of the table. `entries`: first and last sequence of the log in it. `replay`: "" until it was checked."""

    fault: str
    requests: int
    failed: int
    lost: int
    doubled: int
    unserved_s: EngineSeconds
    well_s: EngineSeconds | None
    entries: tuple[int, int]
    findings: list[str] = field(default_factory=list)
    replay: str = ""


def judged(
    fault: str,
    evidence: Evidence,
    started: Mapping[str, int],
    *,
    first: int,
    excused: Callable[[Exchange], bool],
    load: tuple[float, float],
    well_s: EngineSeconds | None,
) -> Row:
    """`started`: how often engines began each request. `first`: sequence of the log before the first of them. `load`:
    when the fault began and when clients stopped (monotonic)."""
    failed = [one for one in evidence.exchanges if one.ending != "completed"]
    unexcused = [one for one in failed if not excused(one)]
    window = replace(
        evidence,
        exchanges=[one for one in evidence.exchanges if one.ending == "completed" or not excused(one)],
        entries=[entry for entry in evidence.entries if entry.sequence > first],
        archived={sequence: payload for sequence, payload in evidence.archived.items() if sequence > first},
    )
    unanswered = {one.request for one in (*checks.unanswered(window), *unexcused)}
    ends = list(checks.every_request_has_one_end(window))
    granted_twice = list(checks.no_request_ran_twice(window))
    too_often = run_too_often(window, started)
    unseen = [one.request for one in evidence.exchanges if one.ending == "completed" and not started.get(one.request)]
    return Row(
        fault=fault,
        requests=len(evidence.exchanges),
        failed=len(failed),
        lost=len(unanswered) + sum("without" in found for found in ends),
        doubled=len(granted_twice) + len(too_often) + sum("without" not in found for found in ends),
        unserved_s=longest_silence(evidence.exchanges, *load),
        well_s=well_s,
        entries=(first + 1, max((entry.sequence for entry in window.entries), default=first)),
        findings=[
            *(found for check in (*CLIENTS, *WHOLE) for found in check(window)),
            *listed("failed without an excuse", [_shown(one) for one in unexcused]),
            *ends,
            *granted_twice,
            *listed("were begun too often by engines", too_often),
            *listed("were answered, but by no engine", unseen),
        ],
    )


def run_too_often(evidence: Evidence, started: Mapping[str, int]) -> list[str]:
    """An engine begins a request once, and once more for each failed attempt that the log has."""
    failed = Counter(e.event.request for e in evidence.entries if isinstance(e.event, RequestAttemptFailed))
    return [f"{request} {count} times" for request, count in started.items() if count > 1 + failed[RequestId(request)]]


def longest_silence(exchanges: list[Exchange], begin: float, end: float) -> EngineSeconds:
    """The longest time between two first bytes of answers."""
    answered = sorted(one.first_byte_at for one in exchanges if one.first_byte_at and begin <= one.first_byte_at <= end)
    moments = [begin, *answered, end]
    return max(after - before for before, after in pairwise(moments))


def _shown(exchange: Exchange) -> str:
    return f"{exchange.request} {exchange.ending} {exchange.status} {exchange.detail}"
