"""Which decisions were applied: each counts once, in whatever order they come and however often."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceDraining, InstanceSuspected, InstanceUndrained
from pointsman.primitives import Epoch, InstanceId, Term
from pointsman.state import recent_decisions
from pointsman.state.fleet import Status
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, reported

ENGINE = InstanceId("a")


def _stamp(number: int, term: int = 1) -> Stamp:
    return Stamp(term=Term(term), number=number, as_of=0)


def _elected(term: int) -> LeaderElected:
    return LeaderElected(at=4.0, term=Term(term), scheduler="s", as_of=0)


@given(st.lists(st.integers(1, 12), max_size=40))
def test_a_number_is_news_once_whatever_came_before(numbers: list[int]) -> None:
    known, seen = RecentDecisions(), set[int]()

    for number in numbers:
        assert known.first_time(_stamp(number)) == (number not in seen)
        seen.add(number)


def test_what_is_remembered_singly_is_only_what_came_before_a_missing_one() -> None:
    known = RecentDecisions()
    numbers = list(range(1, 200))
    Random(1).shuffle(numbers)

    for number in numbers:
        known.first_time(_stamp(number))

    assert (known.through, known.beyond) == (199, set())


def test_a_decision_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_decisions, "DISORDER_MAX", 10)
    known = RecentDecisions()

    for number in range(3, 100):
        assert known.first_time(_stamp(number))

    assert (known.through, known.beyond) == (99, set())
    assert not known.first_time(_stamp(1))


def test_each_term_has_its_own_numbers() -> None:
    known = RecentDecisions()

    assert [known.first_time(_stamp(1, term)) for term in (1, 2, 2)] == [True, True, False]


@pytest.mark.parametrize(
    ("copied", "then"),
    [
        (
            InstanceSuspected(at=4.0, stamp=_stamp(1), instance=ENGINE, epoch=Epoch(1), silent_seconds=3.0),
            [reported("a", 0, [], at=5.0)],
        ),
        (
            InstanceDraining(at=4.0, stamp=_stamp(1), instance=ENGINE, epoch=Epoch(1)),
            [InstanceUndrained(at=5.0, stamp=_stamp(2), instance=ENGINE, epoch=Epoch(1))],
        ),
    ],
    ids=["a suspicion", "a draining"],
)
def test_a_second_copy_does_not_bring_back_what_was_called_off(copied: LogEvent, then: list[LogEvent]) -> None:
    state = State(PoolSettings())

    for sequence, event in enumerate([joined("a"), copied, *then, copied], start=1):
        state.apply(event, sequence)

    assert state.fleet[ENGINE].status is Status.READY


def test_a_draining_decided_before_the_instance_began_anew_counts_for_its_new_life() -> None:
    drained: LogEvent = InstanceDraining(
        at=4.0, stamp=Stamp(term=Term(1), number=1, as_of=1), instance=ENGINE, epoch=Epoch(1)
    )
    joins: list[LogEvent] = [joined("a"), joined("a", epoch=2)]
    leader, follower = State(PoolSettings()), State(PoolSettings())

    leader.apply(joins[0], 1)
    leader.apply(drained)
    leader.apply(joins[1], 2)
    for sequence, event in enumerate([*joins, drained], start=1):
        follower.apply(event, sequence)

    assert leader.fleet[ENGINE].status is follower.fleet[ENGINE].status is Status.DRAINING


def test_decisions_forged_by_a_worker_use_up_no_number_of_another_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_decisions, "DISORDER_MAX", 40)
    monkeypatch.setattr(recent_decisions, "CLAIMS_MAX", 20)
    known, other = RecentDecisions(), InstanceId("b")

    for number in range(1, 300):
        for ahead in (1, 0, 2, 5, 90, 10**9, *range(25)):
            known.first_time(_stamp(number + ahead), ENGINE)
        decided = other if number % 3 == 0 else None

        assert known.first_time(_stamp(number), decided), number
        assert not known.first_time(_stamp(number), decided), number
        assert len(known.claims) <= 20
        assert len(known.beyond) <= 40


@pytest.mark.parametrize("term", [1, 2, 9])
def test_decisions_forged_before_the_election_of_their_term_use_up_no_number_of_it(term: int) -> None:
    state = State(PoolSettings())
    forged: list[LogEvent] = [
        InstanceDraining(at=4.0, stamp=_stamp(number, term), instance=InstanceId("b"), epoch=Epoch(1))
        for number in (1, 2)
    ]
    drained: LogEvent = InstanceDraining(at=5.0, stamp=_stamp(1, term), instance=ENGINE, epoch=Epoch(1))
    elected = [_elected(number) for number in range(1, term + 1)]

    for sequence, event in enumerate([*forged, joined("a"), *elected[:-1], *forged, elected[-1], drained], start=1):
        state.apply(event, sequence)

    assert state.fleet[ENGINE].status is Status.DRAINING
    assert state.recent_decisions.through == 1


def test_a_decision_forged_for_a_later_term_does_not_make_repeats_count_again() -> None:
    state = State(PoolSettings())
    drained: LogEvent = InstanceDraining(at=5.0, stamp=_stamp(1), instance=ENGINE, epoch=Epoch(1))
    forged: LogEvent = InstanceDraining(at=5.0, stamp=_stamp(1, 9), instance=InstanceId("b"), epoch=Epoch(1))
    undrained: LogEvent = InstanceUndrained(at=6.0, stamp=_stamp(2), instance=ENGINE, epoch=Epoch(1))

    for sequence, event in enumerate([joined("a"), _elected(1), drained, forged, undrained, drained], start=1):
        state.apply(event, sequence)

    assert state.fleet[ENGINE].status is Status.READY
