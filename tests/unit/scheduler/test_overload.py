"""When a leader refuses: the load of its log, and how long requests wait for it; what is told of it, when and how often."""

from typing import cast

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestsRefused
from pointsman.contracts.reasons import RejectReason
from pointsman.ports import EventLog
from pointsman.primitives import RequestId, Term, WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.state.workload import Workload
from pointsman_scheduler.overload import LOG_LOAD_PART, REQUESTS_PART, Overload
from tests.support.events import route
from tests.support.settable_clock import StandingClock

TERM = Term(7)


class Log:
    write_load = 0.0


class OverloadBench:
    def __init__(self, speed: float = 1.0) -> None:
        self.clock = StandingClock(speed)
        self.board = HealthBoard(pool="p")
        self.log = Log()
        self.load = Overload(cast(EventLog, self.log), self.clock, self.board, "scheduler-1")
        self.workload = Workload()

    def reason(self, request: str = "new", *, waited: float = 0.0) -> str:
        return self.load.reason(route(request, [1]), self.workload, WallSeconds(waited)) or ""

    def refuses(self, request: str = "new") -> bool:
        return bool(self.reason(request))

    def refuse(self, count: int, reason: RejectReason = RejectReason.LOG_OVERLOADED) -> None:
        for number in range(count):
            self.load.refusal(route(f"r-{number}", [1]), reason, TERM)

    def reasons(self, *waits: tuple[float, float]) -> list[str]:
        """Of requests, each so many seconds after the one before, having waited so long."""
        found = []
        for after, waited in waits:
            self.clock.at += after
            found.append(self.reason(waited=waited))
        return found

    def look_after(self, seconds: float, *, leads: bool = True) -> list[LogEvent]:
        self.clock.at += seconds
        return self.load.look(leads=leads)


@pytest.fixture
def bench() -> OverloadBench:
    return OverloadBench()


@pytest.mark.parametrize(
    ("share", "busy", "refuses"),
    [(0.0, False, False), (0.24, False, False), (0.25, True, False), (0.49, True, False), (0.5, True, True), (3.0, True, True)],
)  # fmt: skip
def test_plans_are_refused_from_a_quarter_of_the_window_on_and_requests_from_its_half(
    bench: OverloadBench, share: float, busy: bool, refuses: bool
) -> None:
    bench.log.write_load = share

    assert (bench.load.log_busy, bench.refuses()) == (busy, refuses)


def test_there_is_no_hysteresis_so_that_as_many_are_taken_as_the_log_takes(bench: OverloadBench) -> None:
    answers = []
    for share in (0.6, 0.49, 0.5, 0.0):
        bench.log.write_load = share
        answers.append(bench.refuses())

    assert answers == [True, False, True, False]


def test_a_request_that_is_in_flight_or_has_ended_is_not_refused(bench: OverloadBench) -> None:
    bench.log.write_load = 1.0
    bench.workload.requests[RequestId("placed")] = None  # type: ignore[assignment]
    bench.workload.end(RequestId("over"), "finished")

    assert [bench.refuses(name) for name in ("placed", "over", "new")] == [False, False, True]


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_a_refusal_names_its_request_its_term_and_when_to_come_back(speed: float) -> None:
    command = route("r", [1], attempt=2)
    refused = OverloadBench(speed).load.refusal(command, RejectReason.LOG_OVERLOADED, TERM)

    assert (refused.request, refused.attempt, refused.term) == ("r", 2, TERM)
    assert (refused.status, refused.reason) == (503, "log_overloaded")
    assert refused.retry_after == 5.0 * speed


def test_refused_requests_are_told_every_ten_seconds_while_it_lasts_and_once_at_its_end(bench: OverloadBench) -> None:
    bench.log.write_load = 0.8
    told: list[LogEvent] = []
    for second in range(1, 26):
        bench.refuse(2)
        told += bench.look_after(1.0)
        if second == 25:
            bench.log.write_load = 0.3
    told += bench.look_after(1.0)
    told += bench.look_after(60.0)

    assert all(isinstance(event, RequestsRefused) for event in told)
    assert sum(event.count for event in told if isinstance(event, RequestsRefused)) == 50
    assert [event.at for event in told] == [1010.0, 1020.0, 1026.0]
    assert [event.since for event in told] == [1000.0, 1010.0, 1020.0]  # type: ignore[union-attr]


def test_nothing_is_told_where_nothing_was_refused(bench: OverloadBench) -> None:
    bench.log.write_load = 0.8

    assert [bench.look_after(20.0), bench.look_after(20.0)] == [[], []]


def test_who_does_not_lead_keeps_the_count_until_it_does(bench: OverloadBench) -> None:
    bench.log.write_load = 0.8
    bench.refuse(3)
    bench.log.write_load = 0.0

    assert bench.look_after(20.0, leads=False) == []
    (told,) = bench.look_after(5.0)
    assert isinstance(told, RequestsRefused)
    assert (told.count, told.since, told.at, told.scheduler) == (3, 1000.0, 1025.0, "scheduler-1")


def test_it_is_degraded_from_a_quarter_on_and_well_again_only_below_a_tenth(bench: OverloadBench) -> None:
    parts = []
    for share in (0.2, 0.3, 0.7, 0.2, 0.1, 0.09):
        bench.log.write_load = share
        bench.look_after(0.25)
        parts.append(bench.board.degraded_parts.get(LOG_LOAD_PART, ""))

    assert parts[0] == parts[5] == ""
    assert (
        parts[1]
        == "the log is behind: 30% of the window of unconfirmed writes is used; from 50% on new requests get 503"
    )
    assert parts[2] == parts[3] == parts[4]
    assert parts[2].endswith("70% of the window of unconfirmed writes is used; new requests get 503")


def test_requests_that_waited_a_second_are_refused_once_the_queue_has_stood_for_two(bench: OverloadBench) -> None:
    assert bench.reasons((0, 0.9), (1, 1.0), (1.9, 1.2), (0.1, 1.3), (0.1, 0.9), (0.1, 1.0)) == [
        "", "", "", "scheduler_overloaded", "", "scheduler_overloaded",
    ]  # fmt: skip


def test_a_queue_that_has_emptied_is_another_queue(bench: OverloadBench) -> None:
    assert bench.reasons((0, 1.5), (1.9, 1.5), (0.0, 0.24), (0.2, 1.5), (1.9, 1.5)) == [""] * 5
    assert bench.reasons((0.1, 1.5)) == ["scheduler_overloaded"]


def test_what_waited_for_a_new_leader_or_in_a_stopped_process_is_served(bench: OverloadBench) -> None:
    assert bench.reasons((0, 8.0), (0.1, 7.9), (0.1, 7.8), (60, 8.0), (0.1, 7.9)) == [""] * 5


def test_who_is_known_is_served_however_long_it_waited_and_the_log_counts_first(bench: OverloadBench) -> None:
    bench.reasons((0, 1.5), (1, 1.5), (1, 1.5))
    bench.workload.end(RequestId("over"), "finished")

    assert bench.reason("over", waited=1.5) == ""
    bench.log.write_load = 1.0
    assert bench.reason("new", waited=1.5) == "log_overloaded"


def test_each_reason_is_told_by_itself_and_this_one_once_the_queue_is_gone(bench: OverloadBench) -> None:
    bench.reasons((0, 1.5), (1, 1.5), (1, 1.5))
    bench.refuse(3, RejectReason.SCHEDULER_OVERLOADED)
    bench.refuse(2)

    told = bench.look_after(0.25)
    assert [(event.reason, event.count) for event in told if isinstance(event, RequestsRefused)] == [
        ("log_overloaded", 2)
    ]
    assert bench.look_after(0.25) == []
    assert bench.reasons((0, 0.1)) == [""]
    told = bench.look_after(0.25)
    assert [(event.reason, event.count) for event in told if isinstance(event, RequestsRefused)] == [
        ("scheduler_overloaded", 3)
    ]


def test_it_is_degraded_while_requests_wait_a_second_and_well_again_below_a_quarter(bench: OverloadBench) -> None:
    parts = []
    for waited in (0.9, 1.5, 0.5, 0.2):
        bench.reason(waited=waited)
        bench.look_after(0.25)
        parts.append(bench.board.degraded_parts.get(REQUESTS_PART, ""))

    assert parts[0] == parts[3] == ""
    assert parts[1] == parts[2] == "requests wait 1.5 s for a decision; from 1 s on new ones get 503"
