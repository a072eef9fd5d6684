"""Whatever the clocks of the ingresses, the leader knows when their requests came, within the delay of a command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.commands import FollowRequests, RouteRequest
from pointsman.policies.clock_offsets import INGRESSES_MAX, ClockOffsets
from tests.support.events import route


def told(offsets: ClockOffsets, now: float, *, ahead: float, delay: float, ingress: str = "i") -> float:
    """By how many seconds the ingress's clock is behind, as the leader knows after a command of this delay."""
    command = route("r", [1], arrived_at=1.0, sent_at=now - delay + ahead, ingress=ingress)
    return now - offsets.dated(command, now).sent_at


@given(
    ahead=st.floats(-9_000.0, 9_000.0),
    delays=st.lists(st.floats(0.0, 0.9), min_size=5, max_size=40),
    gap=st.floats(0.01, 30.0),
)
def test_an_offset_is_off_by_the_least_delay_of_the_last_minute(ahead: float, delays: list[float], gap: float) -> None:
    offsets, at = ClockOffsets(1.0), 10_000.0
    for number, delay in enumerate(delays):
        at += gap
        found = told(offsets, at, ahead=ahead, delay=delay)
        lately = delays[max(0, number - int(60.0 / gap)) : number + 1]
        assert -ahead - 1e-6 <= found <= -ahead + min(lately) + 1e-6


def test_a_clock_that_is_set_forward_is_followed_at_once_and_one_that_is_set_back_once_that_lasts() -> None:
    offsets = ClockOffsets(1.0)
    assert told(offsets, 10_000.0, ahead=0.0, delay=0.01) == pytest.approx(0.01)
    assert told(offsets, 10_001.0, ahead=3600.0, delay=0.02) == pytest.approx(-3600.0 + 0.02)
    assert told(offsets, 10_002.0, ahead=-3600.0, delay=0.03) == pytest.approx(-3600.0 + 0.02), "perhaps a delay"
    assert told(offsets, 10_003.0, ahead=-3600.0, delay=0.4) == pytest.approx(-3600.0 + 0.02)
    assert told(offsets, 10_004.5, ahead=-3600.0, delay=0.3) == pytest.approx(3600.0 + 0.03)
    assert told(offsets, 10_005.0, ahead=-3600.0, delay=0.5) == pytest.approx(3600.0 + 0.03), "a delay"


@given(
    ahead=st.floats(-9_000.0, 9_000.0),
    outages=st.lists(st.tuples(st.floats(1.1, 90.0), st.floats(2.5, 50.0)), min_size=1, max_size=6),
)
def test_commands_that_were_held_up_together_are_dated_when_they_were_sent(
    ahead: float, outages: list[tuple[float, float]]
) -> None:
    """One a second is sent while the network, or the leader, stands still; all come at its end."""
    offsets, at = ClockOffsets(1.0), 10_000.0
    for lasts, calm in outages:
        assert told(offsets, at, ahead=ahead, delay=0.01) == pytest.approx(0.01 - ahead, abs=0.011)
        at += lasts
        for number in range(int(lasts) + 1):
            assert told(offsets, at, ahead=ahead, delay=lasts - number) == pytest.approx(0.01 - ahead, abs=0.011)
        at += calm


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_heartbeats_tell_that_a_clock_was_set_before_the_next_request_comes(ahead: float) -> None:
    offsets = ClockOffsets(1.0)
    told(offsets, 10_000.0, ahead=0.0, delay=0.01)
    for second in range(1, 6):
        at = 10_000.0 + 1.01 * second
        offsets.note(FollowRequests(requests=[], ingress="i", sent_at=at - 0.02 + ahead), at)

    assert told(offsets, 10_006.0, ahead=ahead, delay=0.03) == pytest.approx(0.02 - ahead)


@given(ahead=st.floats(-9_000.0, 9_000.0), lasts=st.floats(1.1, 90.0))
def test_heartbeats_that_were_held_up_together_are_no_clock_that_was_set(ahead: float, lasts: float) -> None:
    offsets, at = ClockOffsets(1.0), 10_000.0
    told(offsets, at, ahead=ahead, delay=0.01)
    at += lasts
    for number in range(int(lasts) + 1):
        sent_at = at - (lasts - number) + ahead
        offsets.note(FollowRequests(requests=[], ingress="i", sent_at=sent_at), at)

    assert told(offsets, at, ahead=ahead, delay=0.5) == pytest.approx(0.01 - ahead, abs=0.011)


def test_after_the_leaders_clock_was_set_nothing_is_known_of_any() -> None:
    offsets = ClockOffsets(1.0)
    told(offsets, 10_000.0, ahead=0.0, delay=0.01)
    offsets.forget()
    assert told(offsets, 10_600.0, ahead=-599.0, delay=0.02) == pytest.approx(599.0 + 0.02)


def test_seconds_of_another_speed_are_engine_seconds() -> None:
    offsets = ClockOffsets(10.0)
    assert told(offsets, 10_000.0, ahead=0.0, delay=0.1) == pytest.approx(0.1)
    assert told(offsets, 10_001.0, ahead=0.0, delay=8.0) == pytest.approx(0.1), "0.8 s by the wall"


def test_ingresses_have_their_own_clocks_and_one_that_does_not_tell_has_none() -> None:
    offsets = ClockOffsets(1.0)
    assert told(offsets, 10_000.0, ahead=5.0, delay=0.0, ingress="i") == -5.0
    assert told(offsets, 10_000.0, ahead=-5.0, delay=0.0, ingress="k") == 5.0
    silent: RouteRequest = route("r", [1])
    assert offsets.dated(silent, 10_000.0) is silent


def test_so_many_ingresses_are_remembered_and_no_more() -> None:
    offsets = ClockOffsets(1.0)
    for number in range(INGRESSES_MAX + 5):
        told(offsets, 10_000.0, ahead=1.0, delay=0.0, ingress=f"i{number}")
    assert len(offsets._of) == INGRESSES_MAX
