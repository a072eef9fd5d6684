"""That the judge of faults of containers sees what it is there for. Needs no Docker."""

from collections import Counter

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import FleetDescribed
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import RequestAttemptFailed
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Term
from pointsman.state.state import PoolSettings, State
from pointsman_lab.faults.clients import Ending, Exchange
from pointsman_lab.faults.injector import Injection
from pointsman_lab.faults.observations import Evidence
from tests.containers.faults import connections_of_a_dead_ingress, nothing, streams_of_a_dead_engine
from tests.containers.judge import Row, judged
from tests.support.events import finished

STRUCK = Injection(fault="kill:ingress", victim="ingress", pids=[], at=100.0, began=0.0, lasted=1.5)


def test_a_request_with_one_answer_one_end_and_one_run_is_neither_lost_nor_doubled() -> None:
    row = verdict([asked("r")], [granted("r", 1), finished("r", "e", at=1.0)], ran="r")

    assert (row.lost, row.doubled) == (0, 0)
    assert [found for found in row.findings if "archived" not in found and "leads" not in found] == []


def test_a_request_that_two_engines_ran_is_doubled() -> None:
    twice = verdict([asked("r")], [granted("r", 1), finished("r", "e", at=1.0)], ran="rr")
    again = verdict(
        [asked("r")], [granted("r", 1), attempt_failed("r"), granted("r", 2), finished("r", "e", at=1.0)], ran="rr"
    )

    assert (twice.lost, twice.doubled, again.doubled) == (0, 1, 0)
    assert "1 were begun too often by engines: r 2 times" in twice.findings


def test_a_request_that_was_granted_or_ended_twice_is_doubled() -> None:
    grants = verdict([asked("r")], [granted("r", 1), granted("r", 1), finished("r", "e", at=1.0)], ran="r")
    ends = verdict([asked("r")], [granted("r", 1), finished("r", "e", at=1.0), finished("r", "e", at=1.0)], ran="r")

    assert (grants.doubled, ends.doubled) == (1, 1)


def test_a_request_without_an_end_or_an_answer_is_lost() -> None:
    endless = verdict([asked("r")], [granted("r", 1)], ran="r")
    mute = verdict([asked("r", "lost")], [granted("r", 1), finished("r", "e", at=1.0)], ran="r")

    assert (endless.lost, mute.lost) == (1, 1)


def test_an_answer_that_no_engine_gave_is_found() -> None:
    assert (
        "1 were answered, but by no engine: r" in verdict([asked("r")], [finished("r", "e", at=1.0)], ran="").findings
    )


def test_a_failed_request_needs_an_excuse() -> None:
    dropped = asked("r", "dropped", ended_at=100.5)

    assert verdict([dropped], [], ran="").lost == 1
    assert verdict([dropped], [], ran="", excused=True).lost == 0


def test_a_dead_ingress_excuses_connections_that_broke_with_it_and_nothing_later() -> None:
    assert connections_of_a_dead_ingress(asked("r", "dropped", ended_at=100.5), STRUCK)
    assert not connections_of_a_dead_ingress(asked("r", "dropped", ended_at=99.0), STRUCK)
    assert not connections_of_a_dead_ingress(asked("r", "dropped", ended_at=104.0), STRUCK)
    assert not connections_of_a_dead_ingress(asked("r", "cut", ended_at=100.5), STRUCK)
    assert not nothing(asked("r", "dropped", ended_at=100.5), STRUCK)


def test_a_dead_engine_excuses_its_own_streams_only() -> None:
    engine = Injection(fault="kill:engine-1", victim="engine-1", pids=[], at=100.0, began=0.0, lasted=1.5)

    assert streams_of_a_dead_engine(asked("r", "cut", instance="engine-1"), engine)
    assert not streams_of_a_dead_engine(asked("r", "cut", instance="engine-2"), engine)
    assert not streams_of_a_dead_engine(asked("r", "failed", instance="engine-1"), engine)
    assert not streams_of_a_dead_engine(asked("r", "cut", instance="engine-1", asked_at=102.0), engine)


def test_the_time_without_service_is_the_longest_between_two_answers() -> None:
    exchanges = [asked("a", first_byte_at=101.0), asked("b", first_byte_at=105.5), asked("c", first_byte_at=106.0)]

    assert verdict(exchanges, [], ran="").unserved_s == 4.5


def asked(
    request: str,
    ending: Ending = "completed",
    *,
    asked_at: float = 99.0,
    ended_at: float = 101.0,
    first_byte_at: float | None = None,
    instance: str = "",
) -> Exchange:
    return Exchange(
        request=request, streamed=True, asked_at=asked_at, ended_at=ended_at, first_byte_at=first_byte_at, ending=ending,
        detail="engine_failed" if ending == "cut" else "", instance=instance,
    )  # fmt: skip


def granted(request: str, attempt: int) -> RequestGranted:
    return RequestGranted(
        at=0.0,
        request=RequestId(request),
        instance=InstanceId("e"),
        attempt=attempt,
        stamp=Stamp(term=Term(1), number=1, as_of=0),
    )


def attempt_failed(request: str) -> RequestAttemptFailed:
    return RequestAttemptFailed(
        at=0.0, request=RequestId(request), instance=InstanceId("e"), failure="connect_failure", attempt=1
    )


def verdict(exchanges: list[Exchange], events: list[LogEvent], *, ran: str, excused: bool = False) -> Row:
    entries = [LogEntry(number, "", b"", event) for number, event in enumerate(events, 1)]
    leader = FleetDescribed(
        instances=[], pool="p", policy="p", admission="a", ordering="o", scheduler="s", term=Term(1), as_of=0,
        speed=1.0,
    )  # fmt: skip
    injections = [] if not excused else [STRUCK]
    evidence = Evidence(exchanges, injections, entries, [], State(PoolSettings()), leader)
    evidence.archived = {entry.sequence: entry.payload for entry in entries}
    return judged(
        "planted", evidence, Counter(ran), first=0, excused=lambda _: excused, load=(101.0, 106.0), well_s=0.0
    )
