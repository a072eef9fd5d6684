"""Upper values of predicted TTFT: nine of ten first tokens come within them, whatever the error's distribution."""

from collections.abc import Callable
from math import isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import InstanceId
from pointsman.state.ttft_intervals import WIDTH_MAX, TtftIntervals

A, B = InstanceId("a"), InstanceId("b")


def observe(intervals: TtftIntervals, instance: InstanceId, predicted: float, actual: float, work: float = 1.0) -> bool:
    """Whether the first token came within its upper value."""
    upper = predicted * intervals.factor(instance, predicted, work)
    intervals.learn(instance, predicted=predicted, upper=upper, actual=actual, work=work)
    return actual <= upper


@pytest.mark.parametrize("error", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("bias", [-0.5, 0.0, 0.5])
def test_nine_of_ten_come_within(error: float, bias: float) -> None:
    intervals, chance = TtftIntervals(), Random(1)
    within = []
    for _ in range(3_000):
        predicted = chance.lognormvariate(0, 1)
        within.append(observe(intervals, A, predicted, predicted * chance.lognormvariate(bias, error)))

    share = sum(within[500:]) / 2_500
    assert share >= 0.87
    if bias >= 0:  # with a bias below, the upper value is the predicted one
        assert share <= 0.93
    assert intervals.coverage == pytest.approx(sum(within[-500:]) / 500, abs=0.03)


def test_each_part_has_an_upper_value_of_its_own() -> None:
    """Instance b and requests that wait err more."""
    intervals, chance = TtftIntervals(), Random(1)
    within: dict[tuple[InstanceId, bool], list[bool]] = {}
    for _ in range(6_000):
        instance, waits = chance.choice((A, B)), chance.random() < 0.5
        error = (0.1 if instance == A else 0.4) + 0.3 * waits
        predicted = 2.0 if waits else 1.0
        within.setdefault((instance, waits), []).append(
            observe(intervals, instance, predicted, predicted * chance.lognormvariate(0, error))
        )

    for shown in within.values():
        assert 0.84 <= sum(shown[300:]) / len(shown[300:]) <= 0.96
    assert intervals.factor(B, 2.0, 1.0) > intervals.factor(B, 1.0, 1.0) > intervals.factor(A, 1.0, 1.0)


def test_a_new_instance_is_wider_than_one_that_has_shown_itself() -> None:
    intervals, chance = TtftIntervals(), Random(1)
    for _ in range(500):
        observe(intervals, A, 1.0, chance.lognormvariate(0, 0.2))

    assert intervals.factor(InstanceId("new"), 1.0, 1.0) > 1.1 * intervals.factor(A, 1.0, 1.0)


def test_a_change_of_the_error_is_followed() -> None:
    intervals, chance = TtftIntervals(), Random(1)
    for _ in range(500):
        observe(intervals, A, 1.0, chance.lognormvariate(0, 0.1))
    within = [observe(intervals, A, 1.0, chance.lognormvariate(0.7, 0.3)) for _ in range(400)]

    assert sum(within[100:]) / 300 > 0.85


def test_a_long_outage_is_forgotten_soon() -> None:
    intervals = TtftIntervals()
    for _ in range(2_000):
        observe(intervals, A, 1.0, 1e6)
    for _ in range(500):
        observe(intervals, A, 1.0, 0.9)

    assert intervals.factor(A, 1.0, 1.0) < 1.5


def told_late(bias: Callable[[int], float], *, requests: int, under_way: int) -> list[tuple[bool, float]]:
    """Of each request, whether it came within, and its upper value over the predicted one. So many others are placed before its
    first token. Log-normal errors."""
    intervals, chance = TtftIntervals(), Random(1)
    told = [(0.0, 0.0)] * requests
    ended = []
    for number in range(requests + under_way):
        if number < requests:
            factor = intervals.factor(A, 1.0, 1.0)
            told[number] = factor, chance.lognormvariate(bias(number), 0.3)
        if number >= under_way:
            factor, actual = told[number - under_way]
            intervals.learn(A, predicted=1.0, upper=factor, actual=actual, work=1.0)
            ended.append((actual <= factor, factor))
    return ended


def test_it_does_not_swing_where_hundreds_wait() -> None:
    """What is told to those that wait cannot be changed any more."""
    ended = told_late(lambda _: 0.3, requests=6_000, under_way=500)[2_000:]
    factors = sorted(factor for _, factor in ended)
    quarters = [sum(within for within, _ in ended[start : start + 500]) / 500 for start in range(0, 4_000, 500)]

    assert factors[len(factors) // 20] > 1.5
    assert factors[-len(factors) // 20] < 2.6, "nine of ten come within 1.98 times the prediction"
    assert all(0.8 < share < 0.98 for share in quarters)


def test_it_follows_queues_that_grow() -> None:
    ended = told_late(lambda number: number / 6_000, requests=6_000, under_way=300)[1_000:]

    assert sum(within for within, _ in ended) / len(ended) > 0.87


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.floats(-1e30, 1e30), st.floats(-1e30, 1e30), st.floats(0, 1e30))),
    st.floats(0, 1e30),
)
def test_it_is_bounded_whatever_was_observed(
    observed: list[tuple[InstanceId, float, float, float]], predicted: float
) -> None:
    intervals = TtftIntervals()
    for instance, expected, actual, work in observed:
        observe(intervals, instance, expected, actual, work)

    factor = intervals.factor(A, predicted, 1.0)
    assert isfinite(factor)
    assert 1.0 <= factor <= 2.72**WIDTH_MAX
    assert intervals.coverage is None or 0 <= intervals.coverage <= 1
