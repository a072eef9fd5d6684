from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import InstanceId
from pointsman.state.latency_model import LatencyModel
from pointsman.state.prefill_rate import COVERAGE, MARGIN_MAX, PrefillRate, StepMargin

A = InstanceId("a")


def an_engine(rate: PrefillRate, *, steps: int, prompts: int, work: float = 0.1, speed: float = 1.0) -> None:
    """Steps of so many equal prompts, whose first tokens come milliseconds apart."""
    for _ in range(steps):
        rate.first_token(passed=prompts * work / speed, work=work, tokens=100)
        for _ in range(prompts - 1):
            rate.first_token(passed=0.001, work=work, tokens=100)


def test_a_queue_is_served_as_fast_as_steps_complete_work() -> None:
    """Each prompt of a step of ten takes ten times its work, and the queue of a hundred takes their work."""
    rate = PrefillRate()

    an_engine(rate, steps=40, prompts=10)

    assert rate.correction.seconds(10.0, 10_000) == pytest.approx(10.0, rel=0.03)


def test_an_engine_of_half_the_speed_takes_twice_as_long_for_a_queue() -> None:
    rate = PrefillRate()

    an_engine(rate, steps=150, prompts=10, speed=0.5)

    assert rate.correction.seconds(10.0, 10_000) == pytest.approx(20.0, rel=0.05)


def test_a_step_is_as_long_as_what_was_computed_beside_its_first_prompt() -> None:
    rate = PrefillRate()

    an_engine(rate, steps=40, prompts=10)

    assert rate.step_seconds == pytest.approx(0.9, rel=0.05)


def test_an_engine_that_computes_one_prompt_at_a_time_has_no_full_step() -> None:
    rate = PrefillRate()

    an_engine(rate, steps=40, prompts=1)

    assert rate.step_seconds == 0.0


def test_prompts_that_turned_out_to_be_cached_make_no_long_step() -> None:
    """Booked with 5 s each, they came together with one that took 0.2 s."""
    rate = PrefillRate()
    for _ in range(40):
        rate.first_token(passed=0.2, work=0.2, tokens=100)
        rate.first_token(passed=0.0, work=5.0, tokens=9_000)

    assert rate.step_seconds <= 2.0


def test_a_step_follows_each_first_token_whoever_asked_before() -> None:
    rate, lengths = PrefillRate(), []
    for number in range(200):
        rate.first_token(passed=0.3 if number % 4 == 0 else 0.001, work=0.01 * (1 + number % 7), tokens=100 + number)
        lengths.append(rate.step_seconds)

        assert lengths[-1] == rate.correction.seconds(rate.beside_seconds, int(rate.beside_tokens))
    assert len(set(lengths)) > 10


def test_steps_become_short_again_when_load_is_low() -> None:
    rate = PrefillRate()
    an_engine(rate, steps=10, prompts=10)

    an_engine(rate, steps=200, prompts=1)

    assert rate.step_seconds < 0.05


@given(st.integers(0, 3), st.floats(0.05, 3.0))
def test_four_of_five_come_within_the_margin(seed: int, step: float) -> None:
    """Lateness spread evenly over a step, in an order that depends on the seed."""
    margin = StepMargin()
    for number in range(2_000):
        margin.learn(((number + seed) * 0.618) % 1.0 * step, step)

    assert margin.steps == pytest.approx(COVERAGE, abs=0.1)


def test_who_did_not_wait_teaches_no_margin() -> None:
    margin = StepMargin()

    for _ in range(100):
        margin.learn(5.0, 0.0)

    assert margin.steps == StepMargin().steps


def test_a_margin_is_bounded_by_what_is_ahead() -> None:
    model = LatencyModel(64)
    for _ in range(40):
        model.first_token(A, passed=1.0, work=0.1, tokens=100)
        for _ in range(9):
            model.first_token(A, passed=0.0, work=0.1, tokens=100)

    assert model.margin_seconds(A, 0.0) == 0.0
    assert 0 < model.margin_seconds(A, 0.01) <= MARGIN_MAX * 0.01
    assert model.margin_seconds(A, 100.0) == model.margin_seconds(A, 50.0)


def test_before_fold_version_7_work_ahead_is_corrected_as_a_prompt_is_and_has_no_margin() -> None:
    """Kept as it was: recorded decisions were made by it."""
    before = LatencyModel(64, by_rate=False)
    before.learn(A, predicted=1.0, observed=2.0, tokens=1_000)
    for _ in range(10):
        assert before.first_token(A, passed=1.0, work=1.0, tokens=100) == 0.0
        before.first_token(A, passed=0.0, work=1.0, tokens=100)

    # One prompt counts for a third of the prior's 2 s; seconds per token have a tenth of half of a share.
    by_cost, by_tokens = 5.0 * (1.94 + 2.0) / (1.94 + 1.0), 5_000 * 2.0 / 1_000
    assert before.expected_seconds(A, 5.0, 5_000) == pytest.approx(by_cost + 0.05 * 4 / 5 * (by_tokens - by_cost))
    assert before.margin_seconds(A, 5.0) == 0.0


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.integers(0, 2**40)), max_size=40))
def test_nothing_that_an_engine_reports_breaks_its_bounds(first_tokens: list[tuple[float, float, int]]) -> None:
    rate = PrefillRate()
    for passed, work, tokens in first_tokens:
        rate.first_token(passed=passed, work=work, tokens=tokens)

    assert isfinite(rate.step_seconds)
    assert rate.step_seconds >= 0
