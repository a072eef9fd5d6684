"""Checks after every run, on clients, log, archive and engines. Each yields findings as sentences."""

from collections import Counter
from collections.abc import Callable, Iterator

from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestRejected, WritesLost
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished, is_given_up
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, RequestId
from pointsman_lab.faults.bad_engines import BACK_SECONDS_MAX, FIRST_SECONDS, TOUCHED_SHARE_MAX
from pointsman_lab.faults.clients import Ending, Exchange, unserved
from pointsman_lab.faults.observations import Evidence
from pointsman_lab.faults.schedule import GENTLE
from pointsman_lab.invariants import (
    SHOWN_MAX,
    arrivals,
    different_decisions,
    ends_by_request,
    listed,
    missing_decisions,
)

Check = Callable[[Evidence], Iterator[str]]

DROPPED_SECONDS_MAX = 5.0
"""Until a client, on a busy machine too, has noticed that its connection broke."""
NETWORK = "network"
GONE_SECONDS_MAX = 16.0
"""Until a balancer has dropped its connections to a host that is gone: 11 s of keep-alive."""
ENDS_OF: dict[Ending, tuple[type[object], ...]] = {
    "completed": (RequestFinished,),
    "cut": (RequestFailed,),
    "failed": (RequestFailed,),
    "refused": (RequestRejected, RequestFailed, RequestCancelled),
}
"""Log ends that match a client's result. A refusal whose leader died before writing it is ended as cancelled by the
next leader."""


def every_request_got_one_answer(evidence: Evidence) -> Iterator[str]:
    """A whole answer, a refusal with a reason, or a stream that ends with an error event."""
    lost = unanswered(evidence)
    for exchange in lost[:SHOWN_MAX]:
        yield f"{exchange.request}: {exchange.detail or 'still waits'}"
    if len(lost) > SHOWN_MAX:
        yield f"and {len(lost) - SHOWN_MAX} more"


def unanswered(evidence: Evidence) -> list[Exchange]:
    return [e for e in evidence.exchanges if e.ending in ("lost", "waits") or _dropped_by_nobody(e, evidence)]


def every_request_has_one_end(evidence: Evidence) -> Iterator[str]:
    ends, arrived = ends_by_request(evidence.entries), arrivals(evidence.entries)
    asked = [RequestId(e.request) for e in evidence.exchanges if e.ending not in ("refused", "dropped")]
    several = {r: found for r, found in ends.items() if len(found) > 1 and not all(is_given_up(e.event) for e in found)}
    yield from listed(
        "without an end", [request for request in dict.fromkeys([*arrived, *asked]) if request not in ends]
    )
    yield from listed("with several ends", [f"{r}: {'+'.join(map(_kind, found))}" for r, found in several.items()])
    yield from listed("that arrived twice", [request for request, count in Counter(arrived).items() if count > 1])


def clients_and_log_tell_the_same(evidence: Evidence) -> Iterator[str]:
    """Skips requests that the leader ended because their ingress was unresponsive."""
    ends = ends_by_request(evidence.entries)
    given_up = {e.event.request for e in evidence.entries if is_given_up(e.event)}
    for exchange in evidence.exchanges:
        expected = [kind.__name__ for kind in ENDS_OF.get(exchange.ending, ())]
        request = RequestId(exchange.request)
        for end in ends.get(request, [])[:1] if request not in given_up else ():
            if expected and _kind(end) not in expected:
                yield f"{request} was {exchange.ending} for its client and ended as {_kind(end)}"


def no_request_ran_twice(evidence: Evidence) -> Iterator[str]:
    """Leaders grant each attempt of a request once."""
    grants: Counter[tuple[str, int]] = Counter()
    for entry in evidence.entries:
        event = entry.event
        if isinstance(event, RequestGranted) and event.stamp is not None:
            grants[event.request, event.attempt] += 1
    yield from listed("granted twice", [f"{request}, attempt {a}" for (request, a), n in grants.items() if n > 1])


def one_leader_a_term(evidence: Evidence) -> Iterator[str]:
    """Several nats-servers do not refuse what a deposed leader had sent before (decision 19); the fold passes over it."""
    term, numbers = 0, set[int]()
    for entry in evidence.entries:
        event = entry.event
        if isinstance(event, LeaderElected):
            if event.term <= term:
                yield f"term {event.term} begins at {entry.sequence}, after term {term}"
            term, numbers = event.term, set()
        elif event is not None and event.stamp is not None:
            if event.stamp.term < term and evidence.log_replicas > 1:
                continue
            if event.stamp.term != term:
                yield f"entry {entry.sequence} is a decision of term {event.stamp.term}, in term {term}"
            elif event.stamp.number in numbers:
                yield f"entry {entry.sequence} is decision {event.stamp.number} of term {term} once more"
            numbers.add(event.stamp.number)
    yield from missing_decisions(term, numbers)


def replay_is_identical(evidence: Evidence) -> Iterator[str]:
    yield from different_decisions(evidence.entries, complete=True)


def index_equals_engines(evidence: Evidence) -> Iterator[str]:
    yield from evidence.silent
    leader = {i.instance: i for i in evidence.leader.instances} if evidence.leader else {}
    if not leader:
        yield "no scheduler leads"
    for instance, truth in evidence.truth.items():
        index, view = evidence.state.index.keys(instance), leader.get(instance)
        if index != truth:
            yield f"{instance}: the log's index misses {len(truth - index)} of {len(truth)} keys, {len(index - truth)} too many"
        if view is None:
            yield f"{instance} is not in the leader's fleet"
        elif (view.cached_blocks, view.digest) != (len(truth), xor_of(truth)):
            yield f"{instance}: the leader counts {view.cached_blocks} blocks, the engine {len(truth)}"
        elif (view.status, view.knowledge) != ("ready", "exact"):
            yield f"{instance} is {view.status}, {view.knowledge} {view.doubt}"


def nothing_is_left_over(evidence: Evidence) -> Iterator[str]:
    yield from listed("under way in the log", list(evidence.state.workload.requests))
    for view in evidence.leader.instances if evidence.leader else []:
        if view.pending or view.in_prefill or view.decoding:
            yield f"{view.instance}: {view.pending} pending, {view.in_prefill} in prefill, {view.decoding} decoding"


def the_log_is_whole(evidence: Evidence) -> Iterator[str]:
    for reason in evidence.resets:
        yield f"the log went back: {reason}"
    for entry in evidence.entries:
        if entry.event is None:
            yield f"entry {entry.sequence} is not understood: {entry.problem}"
        elif isinstance(entry.event, WritesLost):
            yield f"{entry.event.writer} lost {entry.event.count} writes: {entry.event.reason}"


def the_archive_holds_the_log(evidence: Evidence) -> Iterator[str]:
    yield from evidence.gaps
    log = {entry.sequence: entry.payload for entry in evidence.entries}
    last = max(log, default=0)
    archived = {sequence: payload for sequence, payload in evidence.archived.items() if sequence <= last}
    yield from listed("not archived", [str(s) for s in log if s not in archived])
    yield from listed("archived otherwise", [str(s) for s, payload in archived.items() if log.get(s) != payload])


def no_client_noticed(evidence: Evidence) -> Iterator[str]:
    if evidence.balancer is None or not all(
        injection.fault.partition(":")[0] in GENTLE for injection in evidence.injections
    ):
        return
    failed = [e for e in evidence.exchanges if unserved(e)]
    yield from listed("were not served", [f"{e.request} {e.ending} {e.status} {e.detail}" for e in failed])


def ingresses_stay_in_rotation(evidence: Evidence) -> Iterator[str]:
    """A balancer removes only ingresses that are restarted or struck, where the network loses none of its checks."""
    if evidence.balancer is None:
        return
    for injection in (one for one in evidence.injections if one.victim != NETWORK):
        for server, seconds in injection.out_of_rotation.items():
            if server not in injection.victim.split(", "):
                yield f"{injection.fault} of {injection.victim}: nothing was sent to {server} for {seconds:.1f} s"


def bad_engines_are_avoided(evidence: Evidence) -> Iterator[str]:
    """A misbehaving engine affects few requests after the grace period, is reported, and recovers."""
    for injection in evidence.injections:
        touched = injection.touched
        if touched is None:
            continue
        what = f"{injection.fault} of {touched.instance}"
        if touched.share >= TOUCHED_SHARE_MAX:
            yield f"{what}: {touched.touched} of {touched.asked} requests were sent there after {FIRST_SECONDS:g} s"
        if touched.back_s is None or touched.back_s > BACK_SECONDS_MAX:
            back = "never" if touched.back_s is None else f"only after {touched.back_s:.1f} s"
            yield f"{what}: it was well, and back {back}"
        for command in ("doctor", "explain"):
            if not getattr(touched, command):
                yield f"{what}: {command} does not name it"


LOST: tuple[Check, ...] = (every_request_got_one_answer, every_request_has_one_end, clients_and_log_tell_the_same)
AGREEMENT: tuple[Check, ...] = (nothing_is_left_over, index_equals_engines, the_archive_holds_the_log)
CHECKS: tuple[Check, ...] = (
    *LOST,
    no_request_ran_twice,
    one_leader_a_term,
    replay_is_identical,
    the_log_is_whole,
    no_client_noticed,
    ingresses_stay_in_rotation,
    bad_engines_are_avoided,
    *AGREEMENT,
)


def findings(evidence: Evidence) -> dict[str, list[str]]:
    """Findings of each check, by its name in words."""
    return {check.__name__.replace("_", " "): list(check(evidence)) for check in CHECKS}


def agrees(evidence: Evidence) -> bool:
    return not any(found for check in (*AGREEMENT, every_request_has_one_end) for found in check(evidence))


def xor_of(keys: set[BlockKey]) -> int:
    digest = 0
    for key in keys:
        digest ^= key
    return digest


def _kind(entry: LogEntry) -> str:
    return type(entry.event).__name__


def _dropped_by_nobody(exchange: Exchange, evidence: Evidence) -> bool:
    killed = [s for s in evidence.injections if "ingress" in s.victim and s.fault.startswith(("kill", "gone"))]
    ended = exchange.ended_at or 0.0
    return exchange.ending == "dropped" and not any(
        one.at - 0.1 <= ended <= one.at + (GONE_SECONDS_MAX if one.fault.startswith("gone") else DROPPED_SECONDS_MAX)
        for one in killed
    )
