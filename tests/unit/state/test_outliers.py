"""An engine that fails requests, or is far slower than the others, is given a rest, and tried again by one request."""

from dataclasses import replace
from functools import partial

import pytest

from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import InstanceEjected, InstanceReported, InstanceUnejected
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestAttemptFailed, RequestCancelled
from pointsman.policies.policy_set import UnknownPolicyError, policy_set, recorded_policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId
from pointsman.simulation.replay import verify
from pointsman.state.fleet import Status
from pointsman.state.workload import Stage
from tests.support.events import finished, first_token, joined, reported
from tests.support.failing_pool import PREFILL, policies
from tests.support.failing_pool import FailingPool as Pool

A, B, C, D = (InstanceId(name) for name in "abcd")
WHOLE, EJECTED, TRIED = (Status.READY, False), (Status.EJECTED, False), (Status.READY, True)


def test_five_failures_in_a_row_eject_an_engine_and_say_why() -> None:
    pool = Pool()
    went = pool.serve(40, sick=A)

    (ejection,) = pool.ejections()
    assert (ejection.instance, ejection.cause, ejection.number, ejection.seconds) == (A, "consecutive_failures", 1, 5.0)
    assert ejection.detail == "5 requests in a row failed there: 500 Internal Server Error"
    assert went.count(A) == 5
    assert pool.proven


def test_an_engine_that_serves_in_between_does_not_fail_in_a_row() -> None:
    pool = Pool(policies=policies(failure_share=0, success_rate_stdev_factor=0))
    for _ in range(6):
        pool.visit(A, 4, sick=A)
        pool.visit(A, 1)

    assert not pool.ejections()


def test_half_of_the_requests_of_an_interval_failing_is_enough() -> None:
    pool = Pool(policies=policies(consecutive_failures=0, success_rate_stdev_factor=0))
    for _ in range(5):
        pool.visit(A, 1, sick=A)
        pool.visit(A, 1)

    assert [(e.instance, e.cause) for e in pool.ejections()] == [(A, "failure_share")]
    assert "5 of 10 requests in 10 s failed there" in pool.ejections()[0].detail


def test_where_requests_are_few_half_of_the_newest_ones_failing_is_enough() -> None:
    """One in a few seconds, with an answer in between: neither five in a row nor ten in an interval."""
    pool = Pool(policies=policies(success_rate_stdev_factor=0))
    for _ in range(3):
        pool.visit(A, 2, sick=A)
        pool.visit(A, 1)
        pool.later(11.0)
    assert not pool.ejections()
    pool.visit(A, 1, sick=A)

    assert [(e.instance, e.cause) for e in pool.ejections()] == [(A, "failure_share")]
    assert "7 of 10 requests in 60 s failed there" in pool.ejections()[0].detail
    assert pool.proven


def test_failures_of_more_than_a_minute_ago_and_those_that_are_over_eject_nobody() -> None:
    pool = Pool(policies=policies(success_rate_stdev_factor=0))
    for _ in range(4):
        pool.visit(A, 2, sick=A)
        pool.visit(A, 1)
        pool.later(21.0)
    assert not pool.ejections(), "ten in more than a minute"

    over = Pool(policies=policies(success_rate_stdev_factor=0))
    for _ in range(3):
        over.visit(A, 2, sick=A)
        over.visit(A, 1)
    over.later(11.0)
    over.visit(A, 4)
    assert not over.ejections(), "the last failure was before the interval"


def test_failing_far_more_often_than_the_others_is_enough() -> None:
    pool = Pool(engines="abc", policies=policies(interval_seconds=30))
    for _ in range(10):
        pool.serve(3, sick=A)
        pool.serve(9)

    assert [(e.instance, e.cause) for e in pool.ejections()] == [(A, "success_rate")]
    assert "of its requests succeeded, of the others' 100%" in pool.ejections()[0].detail


def test_a_request_that_fails_wherever_it_goes_ejects_nobody() -> None:
    pool = Pool()
    for _ in range(20):
        request, first = pool.asks()
        pool.fails(request, first)
        _, second = pool.asks(request=request, attempt=2, excluded=first)
        pool.later(0.01)
        pool.fails(request, second, attempt=2)
        pool.gives_up(request)
        assert first != second
        assert not pool.look()

    assert pool.proven


def test_a_request_that_is_under_way_elsewhere_accuses_who_failed_it_once_it_has_been_there_for_longer() -> None:
    pool = Pool()
    for _ in range(20):
        request, instance = pool.asks()
        if instance == A:
            pool.later(0.01)
            pool.fails(request, A)
            pool.asks(request=request, attempt=2, excluded="a")
    assert not pool.look()
    pool.later(0.6)

    assert isinstance(pool.look()[0], InstanceEjected)
    assert pool.proven


def test_what_a_client_gave_up_proves_nothing() -> None:
    pool = Pool()
    for _ in range(20):
        request, instance = pool.asks()
        pool.fails(request, instance, "first_byte_timeout")
        pool.happens(RequestCancelled(at=pool.now, request=RequestId(request), reason="client_gone"))
        assert not pool.look()


def test_a_connection_that_is_not_made_is_never_the_fault_of_the_request() -> None:
    pool = Pool()
    for _ in range(20):
        request, instance = pool.asks()
        if instance == A:
            pool.fails(request, A, "connect_failure")

    assert [type(event) for event in pool.look()][:1] == [InstanceEjected]


def test_an_engine_at_a_tenth_of_its_speed_is_ejected_and_all_alike_slow_are_not() -> None:
    pool = Pool()
    pool.serve(40, sick=A, slow=10)
    assert [(e.instance, e.cause) for e in pool.ejections()] == [(A, "latency")]
    assert "prefills there took 10.0 times what the cost model says" in pool.ejections()[0].detail

    calm = Pool()
    for _ in range(40):
        request, instance = calm.asks()
        calm.answers(request, instance, after=10 * PREFILL)
        assert not calm.look()


def test_a_slowness_of_all_that_has_passed_is_held_against_nobody() -> None:
    pool = Pool()
    for _ in range(40):
        pool.answers(*pool.asks(), after=30 * PREFILL)
        pool.look()
    pool.later(10)
    shown = 0
    for _ in range(80):
        request, instance = pool.asks()
        if instance != A or shown < 2:
            shown += instance == A
            pool.answers(request, instance)
        else:  # an answer that is not streamed shows no first token
            pool.later(PREFILL)
            pool.happens(finished(request, instance, at=pool.now))
        pool.look()

    assert not pool.ejections()


def test_a_prefill_that_is_not_over_counts_once_it_is_overdue_and_others_are_heard_of() -> None:
    pool = Pool()
    for _ in range(24):
        request, instance = pool.asks()
        if instance != A:
            pool.answers(request, instance)
        elif not pool.state.outliers.record(A).prefills:
            pool.answers(request, A, after=10 * PREFILL)
    pool.later(3)
    assert not pool.look(), "nobody else has said anything since: it may be that nobody can"
    request, instance = pool.asks(excluded="a", attempt=2)
    pool.answers(request, instance)

    assert [event.cause for event in pool.look() if isinstance(event, InstanceEjected)] == ["latency"]
    assert pool.proven


def test_what_others_began_a_moment_ago_is_no_measure_though_answers_are_dated_ahead() -> None:
    """Commands waited five seconds for their leader, which takes that for the clock of their ingress."""
    pool, delay = Pool(), 5.0
    pool.clock = -delay
    slow = [pool.asks(excluded="bcd")[0] for _ in range(6)]
    pool.clock = 0.0
    for request in slow:
        pool.answers(request, A, after=0.6)
    pool.clock = -delay
    for _ in range(6):
        pool.asks(excluded="a")
    pool.later(0.05)

    assert not pool.look()


def test_an_engine_that_stood_still_for_a_moment_is_no_outlier() -> None:
    pool = Pool()
    at_a = []
    for _ in range(24):
        request, instance = pool.asks()
        if instance != A:
            pool.answers(request, instance)
        else:
            at_a.append(request)
    pool.later(2)
    for request in at_a:
        pool.answers(request, A, after=0.0)
    pool.later(2)
    pool.answers(*pool.asks(excluded="a", attempt=2))

    assert len(at_a) == 6
    assert not pool.look()


def test_a_request_that_the_leader_gave_up_before_its_ingress_tells_of_the_failure_accuses_the_engine() -> None:
    """An engine that hangs says that nothing runs there."""
    pool = Pool()
    for _ in range(20):
        request, instance = pool.asks()
        if instance == A:
            pool.decides(pool.dispatcher.cancel_any(RequestId(request), CancelCause.ENGINE_IDLE, pool.now + 3.2))
            pool.now += 5.0
            pool.fails(request, A, "first_byte_timeout")
            pool.now -= 4.0
            request, instance = pool.asks(excluded="a", instead_of=request)
        pool.answers(request, instance)
    events = pool.look()

    assert isinstance(events[0], InstanceEjected)
    assert pool.proven


@pytest.mark.parametrize("read_late", [False, True])
@pytest.mark.parametrize("engines", ["idle, fails", "idle, idle, fails", "fails, idle"])
def test_a_request_that_each_engine_loses_or_fails_ejects_nobody(engines: str, *, read_late: bool) -> None:
    """Such as one whose video comes too slowly: meanwhile the engine says that it has nothing to do. Its ingress asks under
    another id, before or behind what it writes about the failure."""
    pool = Pool()
    for _ in range(40):
        request, instance = pool.asks()
        tried, attempt = instance, 1
        for what in engines.split(", "):
            if what == "fails":
                pool.fails(request, instance, attempt=attempt)
                attempt += 1
                _, instance = pool.asks(request=request, attempt=attempt, excluded=tried)
            else:
                pool.later(8.0)
                pool.decides(pool.dispatcher.cancel_any(RequestId(request), CancelCause.ENGINE_IDLE, pool.now))
                tells = partial(pool.fails, request, instance, "first_byte_timeout", attempt=attempt)
                if not read_late:
                    tells()
                request, instance = pool.asks(attempt=attempt + 1, excluded=tried, instead_of=request)
                attempt += 1
                if read_late:
                    tells()
            tried += instance
        pool.gives_up(request)
        assert not pool.look()

    assert pool.proven


def test_a_small_delay_makes_no_outlier_however_small_the_prompt() -> None:
    pool = Pool()
    pool.serve(80, sick=A, slow=3.5)  # 0.16 s more than it should be, as a busy machine does

    assert not pool.ejections()


def test_the_last_engine_and_more_than_the_share_are_never_ejected() -> None:
    pool = Pool(engines="ab")
    for _ in range(40):
        request, instance = pool.asks()
        pool.fails(request, instance, "connect_failure")
        pool.gives_up(request)
        pool.look()
    assert len(pool.ejections()) == 1

    wide = Pool(policies=policies(max_ejection_share=0.5))
    for _ in range(40):
        request, instance = wide.asks()
        wide.fails(request, instance, "connect_failure")
        wide.gives_up(request)
        wide.look()
    assert len(wide.ejections()) == 2


def test_what_waits_there_goes_elsewhere_and_what_is_inside_stays() -> None:
    pool = Pool(policies=policy_set(routing="round_robin", admission="none", ordering="fcfs", prefill_window_tokens=1))
    for _ in range(12):
        pool.asks()
    for number in range(5):
        pool.fails(f"gone-{number}", A, "connect_failure")
    events = pool.look()

    assert isinstance(events[0], InstanceEjected)
    assert sum(isinstance(event, RequestMigrated) for event in events) == 2
    assert len(pool.state.workload.queue(A).prefill) == 1
    assert not pool.state.workload.queue(A).pending
    assert pool.proven


def test_it_is_tried_by_one_request_at_a_time_and_whole_once_that_is_served_well() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    assert pool.status(A) == EJECTED
    pool.later(5)
    assert [type(event) for event in pool.look()] == [InstanceUnejected]
    assert pool.status(A) == TRIED

    trial, there = pool.asks()
    assert there == A
    others = {pool.asks()[1] for _ in range(12)}
    assert others == {B, C, D}
    pool.answers(trial, A)
    pool.look()
    assert pool.status(A) == TRIED
    pool.visit(A, 2)

    assert pool.status(A) == WHOLE
    assert A in {pool.asks()[1] for _ in range(4)}
    placed = next(e.event for e in pool.log if isinstance(e.event, RequestPlaced) and e.event.request == trial)
    assert placed.reason == "a is tried again after its ejection"
    assert pool.proven


def test_who_fails_the_trial_is_ejected_for_longer_up_to_a_bound_and_touches_one_request_each_time() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    touched = 0
    for _ in range(6):
        pool.later(pool.ejections()[-1].seconds)
        pool.look()
        touched += pool.serve(20, sick=A).count(A)

    assert [e.seconds for e in pool.ejections()] == [5.0, 10.0, 15.0, 15.0, 15.0, 15.0, 15.0]
    assert [e.cause for e in pool.ejections()[1:]] == ["failed_probe"] * 6
    assert touched == 6
    assert pool.proven


def test_who_has_failed_the_trial_is_not_tried_again_before_it_is_ejected() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.later(5)
    pool.look()
    trial, there = pool.asks()
    pool.fails(trial, there)
    _, second = pool.asks(request=trial, attempt=2, excluded=there)
    pool.answers(trial, second)

    assert there == A
    assert A not in {pool.asks()[1] for _ in range(4)}
    pool.look()
    assert pool.status(A) == EJECTED
    assert pool.proven


def test_a_slow_trial_fails() -> None:
    pool = Pool()
    pool.serve(40, sick=A, slow=10)
    pool.later(5)
    pool.look()
    assert pool.serve(20, sick=A, slow=10).count(A) == 1

    assert [(e.cause, e.number) for e in pool.ejections()] == [("latency", 1), ("failed_probe", 2)]
    assert "was slow" in pool.ejections()[1].detail


def test_a_request_that_nobody_can_serve_does_not_fail_the_trial() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.later(5)
    pool.look()
    request, first = pool.asks()
    pool.fails(request, first)
    _, second = pool.asks(request=request, attempt=2, excluded=first)
    assert pool.asks()[1] != A, "nobody knows yet whose fault it was"
    pool.fails(request, second, attempt=2)
    pool.gives_up(request)
    pool.look()

    assert first == A
    assert pool.status(A) == TRIED
    assert pool.asks()[1] == A


def test_a_first_token_is_no_proof_before_it_has_lasted() -> None:
    for seconds, passed in ((1.9, False), (2.1, True)):
        pool = Pool()
        pool.serve(40, sick=A)
        pool.later(5)
        pool.look()
        trial, there = pool.asks()
        pool.happens(first_token(trial, there, at=pool.now + PREFILL, prefill=PREFILL))
        pool.later(PREFILL + seconds)
        pool.look()
        assert there == A
        assert pool.status(A) == (WHOLE if passed else TRIED)
        assert (pool.asks()[1] == A) is False or passed
        if not passed:
            pool.fails(trial, A, "stream_reset")
            pool.gives_up(trial)
            pool.look()
            assert pool.status(A) == EJECTED
        assert pool.proven


def test_where_requests_are_few_one_trial_will_do_after_a_while() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.later(5)
    pool.look()
    pool.visit(A, 1)
    assert pool.status(A) == TRIED
    pool.later(5)
    pool.look()

    assert pool.status(A) == WHOLE


def test_the_number_in_a_row_falls_while_an_engine_is_whole() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.later(5)
    pool.look()
    pool.serve(8)
    assert pool.status(A) == WHOLE
    pool.later(25)
    pool.serve(40, sick=A)

    assert [e.number for e in pool.ejections()] == [1, 1]


def test_a_new_life_begins_whole() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.happens(joined("a", at=pool.now, epoch=2))

    assert pool.status(A) == WHOLE
    assert not pool.look()


@pytest.mark.parametrize("clock", [-600.0, -0.5, 0.5, 600.0])
@pytest.mark.parametrize("slow", [1.0, 11.3])
def test_the_clock_of_an_ingress_changes_nothing(slow: float, clock: float) -> None:
    """Nor may a worker, whose clock is another one, end what is not over."""
    right, wrong = Pool(), Pool(clock=clock)
    for pool in (right, wrong):
        pool.serve(40, sick=A, slow=slow)
        pool.later(6.0)
        pool.look()
        pool.serve(40, sick=A, slow=slow)
        pool.later(12.0)
        pool.happens(down("b", at=pool.now + 3600.0))
        pool.look()
        pool.serve(40)

    assert len(right.ejections()) == 2
    assert [(round(e.at, 6), e.cause, e.detail) for e in wrong.ejections()] == [
        (round(e.at, 6), e.cause, e.detail) for e in right.ejections()
    ]
    for one, other in zip(right.state.fleet.instances, wrong.state.fleet.instances, strict=True):
        assert other.status is one.status
        assert wrong.state.latency.correction(one.id) == pytest.approx(right.state.latency.correction(one.id))
        assert wrong.state.promises.blocks(one.id) == right.state.promises.blocks(one.id)
    assert wrong.proven


def test_a_failure_that_is_read_after_the_next_attempt_counts_as_one_that_is_read_before() -> None:
    pool = Pool()
    pool.serve(8)
    for _ in range(5):
        request = ""
        while not request or pool.at_of(request) != A:
            request, _ = pool.asks()
        pool.later(3.0)
        _, other = pool.asks(request=request, attempt=2, excluded="a")
        pool.fails(request, A)
        pool.answers(request, other)

    (ejection,) = [event for event in pool.look() if isinstance(event, InstanceEjected)]
    assert ejection.detail.startswith("5 requests in a row failed there")
    assert pool.proven


def test_failures_that_are_read_after_two_more_attempts_do_not_accuse_the_engines_next_life() -> None:
    pool = Pool()
    moved: list[str] = []
    while len(moved) < 5:
        request, instance = pool.asks()
        if instance == A:
            moved.append(request)
        else:
            pool.answers(request, instance)
    pool.happens(joined("a", at=pool.now, epoch=2))
    for request in moved:
        _, second = pool.asks(request=request, attempt=2, excluded="a")
        _, third = pool.asks(request=request, attempt=3, excluded=f"a{second}")
        pool.fails(request, A, "connect_failure")
        pool.answers(request, third)

    assert not pool.look()
    pool.visit(A, 4, sick=A)
    assert not pool.ejections()
    pool.visit(A, 1, sick=A)
    assert [e.detail for e in pool.ejections()] == ["5 requests in a row failed there: 500 Internal Server Error"]
    assert pool.proven


def test_failures_of_ended_requests_count_now_whatever_the_clock_of_their_ingress() -> None:
    """Of an ingress that is hours ahead, they would be the newest ones for hours."""
    pool = Pool(policies=policies(consecutive_failures=0, success_rate_stdev_factor=0), clock=7200.0)
    ended: list[str] = []
    while len(ended) < 6:
        request, instance = pool.asks()
        pool.answers(request, instance)
        if instance == A:
            ended.append(request)
    for request in ended[:4]:
        pool.fails(request, A, "connect_failure")
    assert not pool.look()
    pool.later(300.0)
    pool.visit(A, 4)
    for request in ended[4:]:
        pool.fails(request, A, "connect_failure")

    assert not pool.look()
    assert pool.proven


def test_the_failures_of_requests_whose_next_attempt_was_refused_accuse_their_engine() -> None:
    """Its command comes before the log's entry: where engines fail under overload, that is the rule."""
    pool = Pool()
    for _ in range(5):
        request = ""
        while not request or pool.at_of(request) != A:
            request, _ = pool.asks()
        pool.refuses(request)
        pool.fails(request, A)

    (ejection,) = [event for event in pool.look() if isinstance(event, InstanceEjected)]
    assert (ejection.instance, ejection.cause) == (A, "consecutive_failures")
    assert not list(pool.state.outliers.open_failures())


def test_a_request_that_was_sent_before_the_ejection_is_no_trial_though_its_failure_comes_late() -> None:
    pool = Pool()
    old = ""
    while not old or pool.at_of(old) != A:
        old, _ = pool.asks()
    pool.serve(40, sick=A)
    pool.later(6.0)
    pool.look()
    assert pool.status(A) == TRIED
    _, other = pool.asks(request=old, attempt=2, excluded="a")
    pool.fails(old, A)
    pool.answers(old, other)

    assert not pool.look()
    assert pool.status(A) == TRIED


def test_a_leader_whose_clock_is_set_back_tries_an_engine_by_one_request_all_the_same() -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    pool.later(6.0)
    pool.look()
    pool.later(-60.0)
    went = [pool.asks()[1] for _ in range(20)]

    assert went.count(A) == 1


@pytest.mark.parametrize("clock", [-60.0, 600.0])
def test_the_clock_of_a_worker_neither_hides_failures_nor_brings_back_those_of_the_life_before(clock: float) -> None:
    pool = Pool()
    doubted: list[str] = []
    while len(doubted) < 4:
        request, instance = pool.asks()
        if instance == A:
            pool.fails(request, A)
            doubted.append(request)
        else:
            pool.answers(request, instance)
    pool.happens(joined("a", at=pool.now + clock, epoch=2))
    for request in doubted:  # another engine serves it: the life before was to blame
        _, instance = pool.asks(request=request, attempt=2, excluded="a")
        pool.answers(request, instance)
    pool.visit(A, 4, sick=A)
    assert not pool.ejections()
    pool.visit(A, 1, sick=A)

    assert [e.detail for e in pool.ejections()] == ["5 requests in a row failed there: 500 Internal Server Error"]
    assert pool.proven


def test_where_nobody_else_is_ready_who_is_ejected_serves() -> None:
    pool = Pool(engines="ab")
    pool.serve(40, sick=A)
    assert pool.status(A) == EJECTED
    assert pool.state.fleet.ready == (B,)
    pool.happens(down("b", at=pool.now))

    request, instance = pool.asks()
    assert instance == A
    assert any(isinstance(e.event, RequestGranted) and e.event.request == request for e in pool.log)
    assert pool.proven


def test_a_request_that_all_who_are_ready_have_failed_goes_to_one_that_is_ejected_and_stays_there() -> None:
    given = policies(base_ejection_seconds=1000, max_ejection_seconds=1000)
    pool = Pool(engines="ab", policies=replace(given, running_max=1))
    pool.serve(12, sick=A)
    assert pool.status(A) == EJECTED
    went = []
    for _ in range(2):
        request, first = pool.asks()
        pool.fails(request, first)
        went.append((first, pool.asks(request=request, attempt=2, excluded=first)[1]))

    assert went == [(B, A), (B, A)]
    assert [request.stage for request in pool.state.workload.requests.values()].count(Stage.PENDING) == 1
    assert not pool.decides(pool.dispatcher.relocate_pending(pool.now))
    assert pool.proven


def test_a_half_open_engine_that_nobody_can_stand_in_for_takes_all() -> None:
    pool = Pool(engines="ab")
    pool.serve(40, sick=A)
    pool.later(5)
    pool.look()
    pool.happens(down("b", at=pool.now))

    assert [pool.asks()[1] for _ in range(3)] == [A] * 3


def test_a_share_of_nothing_turns_it_off_and_so_does_a_log_that_says_nothing_of_it() -> None:
    pool = Pool(policies=policies(max_ejection_share=0))
    pool.serve(40, sick=A)
    assert not pool.ejections()

    chosen = policies()
    old = {name: value for name, value in chosen.settings.items() if not name.startswith("outlier.")}
    assert recorded_policy_set("round_robin", old).outliers.max_ejection_share == 0
    assert recorded_policy_set("round_robin", chosen.settings) == chosen


@pytest.mark.parametrize("cut", [False, True])
def test_a_decision_without_its_evidence_is_a_difference(*, cut: bool) -> None:
    pool = Pool()
    pool.serve(40, sick=A)
    log = [
        LogEntry(e.sequence, e.subject, e.payload, None, "lost")
        if cut and isinstance(e.event, RequestAttemptFailed)
        else e
        for e in pool.log
    ]

    assert verify(log).ok is not cut


def down(instance: str, *, at: float) -> InstanceReported:
    return reported(instance, 0, [], at=at, serving=False)


@pytest.mark.parametrize("setting", [{"interval_seconds": 0}, {"interval_seconds": 61}, {"latency_factor": -1}])
def test_settings_out_of_bounds_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(UnknownPolicyError, match=f"{next(iter(setting))} must be"):
        policies(**setting)
