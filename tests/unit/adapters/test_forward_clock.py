"""Dates that go on, whatever is done to the clock that they are read from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.adapters.clocks import BEHIND_WALL_SECONDS_MAX, ForwardClock
from tests.support.settable_clock import StandingClock

HOUR = float(BEHIND_WALL_SECONDS_MAX)


@given(
    speed=st.sampled_from([1.0, 20.0]),
    steps=st.lists(st.one_of(st.floats(0.0, 30.0), st.floats(-HOUR / 50, 0.0)), min_size=1, max_size=40),
)
def test_they_never_go_back_nor_fall_behind_the_clock_and_pass_while_it_does(speed: float, steps: list[float]) -> None:
    hand = StandingClock(speed)
    clock = ForwardClock(hand)
    for step in steps:
        before = clock.now()
        hand.at += step
        shown = clock.now()

        assert shown >= hand.now()
        assert shown - before >= max(0.0, step) * speed * 0.9 - 1e-6
    hand.at += 11 * HOUR
    assert clock.now() == hand.now()


def test_what_is_begun_behind_a_date_passes_a_tenth_slower_until_the_clock_has_caught_up() -> None:
    hand = StandingClock()
    clock = ForwardClock(hand)
    clock.begin(hand.now() + 180.0)
    began, shown = hand.now(), []
    for _ in range(4):
        shown.append(clock.now() - began)
        hand.at += 600.0

    assert shown == pytest.approx([180.0, 720.0, 1260.0, 1800.0])
    clock.begin(hand.now() - 180.0)
    assert clock.now() == hand.now()


def test_a_date_that_is_hours_ahead_is_of_a_wrong_clock_and_one_that_it_has_shown_before_binds_no_longer() -> None:
    hand = StandingClock()
    clock = ForwardClock(hand)
    clock.begin(hand.now() + HOUR + 1.0)
    assert clock.now() == hand.now()
    hand.at -= HOUR / 2
    assert clock.now() == hand.now() + HOUR / 2
    clock.begin(hand.now())
    assert clock.now() == hand.now()
