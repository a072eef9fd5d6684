"""The correction of the cost model against engines whose law is known, and under hostile inputs."""

from collections.abc import Callable
from math import exp, isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.fleet import PrefillCost
from pointsman.primitives import InstanceId
from pointsman.state.correction import CORRECTION_MAX, CORRECTION_MIN, FAR, Correction
from pointsman.state.engine_profiles import PROFILES
from pointsman.state.latency_model import LatencyModel

COST = PROFILES["qwen2.5-7b-910b4"].prefill_cost
LENGTHS = (100, 1_500, 8_000, 30_000, 60_000)
Law = Callable[[int], float]


def by_cost(tokens: int) -> float:
    return COST.seconds(tokens, 0)


def taught(law: Law, lengths: tuple[int, int], *, count: int = 60, noise: float = 0.1, seed: int = 1) -> Correction:
    correction, chance = Correction(), Random(seed)
    teach(correction, law, lengths, count=count, noise=noise, chance=chance)
    return correction


def teach(
    correction: Correction, law: Law, lengths: tuple[int, int], *, count: int, noise: float = 0.1, chance: Random
) -> None:
    for _ in range(count):
        tokens = chance.randint(*lengths)
        observed = law(tokens) * chance.lognormvariate(0, noise)
        correction.learn(predicted=by_cost(tokens), observed=observed, tokens=tokens)


def off(correction: Correction, law: Law, tokens: int) -> float:
    """Relative error beyond 20 ms."""
    error = correction.seconds(by_cost(tokens), tokens) - law(tokens)
    return max(0.0, abs(error) - 0.02) / law(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_right_cost_model_stays_right_at_lengths_never_seen(tokens: int, seed: int) -> None:
    """Of 1,500 tokens alone: 60,000 were once predicted at two thirds."""
    correction = taught(by_cost, (1_300, 1_700), noise=0.2, seed=seed)

    assert off(correction, by_cost, tokens) < 0.2


@pytest.mark.parametrize("slowness", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_slow_machine_is_slow_at_every_length(tokens: int, slowness: float) -> None:
    def law(tokens: int) -> float:
        return slowness * by_cost(tokens)

    assert off(taught(law, (1_300, 1_700)), law, tokens) < 0.4
    assert off(taught(law, (50, 30_000)), law, tokens) < 0.2


@pytest.mark.parametrize(("tokens", "bound"), [(100, 0.45), (1_500, 0.2), (8_000, 0.15), (60_000, 0.15)])
def test_a_fixed_overhead_is_not_taken_for_slowness(tokens: int, bound: float) -> None:
    def law(tokens: int) -> float:
        return 0.05 + by_cost(tokens)

    assert off(taught(law, (50, 20_000), count=100), law, tokens) < bound


@pytest.mark.parametrize(("tokens", "bound"), [(1_500, 0.2), (8_000, 0.15), (30_000, 0.3)])
def test_a_wrong_law_is_found_in_the_lengths_that_were_seen(tokens: int, bound: float) -> None:
    """An engine without the quadratic term, and slower per token."""

    def law(tokens: int) -> float:
        return 0.02 + 1.6 * COST.per_token_s * tokens

    assert off(taught(law, (500, 30_000), count=100), law, tokens) < bound


def test_estimates_wrong_from_prompt_to_prompt_give_way_to_tokens() -> None:
    """Half of the cost model's estimates are off by half."""
    correction, chance = Correction(), Random(1)
    errors = []
    for number in range(400):
        tokens = chance.randint(1_000, 20_000)
        estimate = by_cost(tokens) * chance.choice((0.5, 1.0, 1.0, 1.5))
        if number >= 200:
            errors.append(abs(correction.seconds(estimate, tokens) / by_cost(tokens) - 1))
        correction.learn(predicted=estimate, observed=by_cost(tokens), tokens=tokens)

    assert sorted(errors)[len(errors) // 2] < 0.2


@pytest.mark.parametrize("first", [52, 1_500])
def test_one_slow_first_prefill_spoils_little(first: int) -> None:
    correction = Correction()
    correction.learn(predicted=by_cost(first), observed=12 * by_cost(first), tokens=first)

    for tokens in LENGTHS:
        assert off(correction, by_cost, tokens) < 1
    if first == 52:
        assert off(correction, by_cost, 3_000) < 0.3


def test_one_outlier_among_many_moves_little() -> None:
    correction = taught(by_cost, (50, 20_000))
    before = [correction.seconds(by_cost(tokens), tokens) for tokens in LENGTHS]
    correction.learn(predicted=by_cost(3_000), observed=100 * by_cost(3_000), tokens=3_000)

    after = [correction.seconds(by_cost(tokens), tokens) for tokens in LENGTHS]
    assert after == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
def test_a_change_of_speed_is_followed_within_60_prefills(speed: float) -> None:
    def law(tokens: int) -> float:
        return speed * by_cost(tokens)

    correction, chance = taught(by_cost, (50, 20_000), count=100), Random(2)
    teach(correction, law, (50, 20_000), count=60, chance=chance)

    assert off(correction, law, 3_000) < 0.3
    assert correction.factor == pytest.approx(speed, rel=0.3)


def test_a_queue_of_many_short_prompts_costs_their_sum() -> None:
    """Each prefill has an overhead: those that miss it let in more than there is time for."""

    def law(tokens: int) -> float:
        return 0.1 + by_cost(tokens)

    correction = taught(law, (400, 600), count=100, noise=0.01)

    assert correction.seconds(0.0, 0) == 0
    for prompts in (1, 3, 10, 100):
        assert correction.seconds(prompts * by_cost(500), prompts * 500) == pytest.approx(prompts * law(500), rel=0.15)


@pytest.mark.parametrize("slowness", [1.0, 1.3])
@pytest.mark.parametrize("prompts", [1, 4])
@pytest.mark.parametrize("tokens", [1_024, 3_072, 12_288, 29_696, 60_000])
def test_a_long_prompt_after_short_ones_that_came_together_costs_what_the_cost_model_says(
    tokens: int, prompts: int, slowness: float
) -> None:
    """Observations of a busy engine are sums: 12,288 tokens are no prompt of that length."""
    correction = Correction()
    for _ in range(60):
        correction.learn(
            predicted=prompts * by_cost(3_072),
            observed=slowness * prompts * by_cost(3_072),
            tokens=prompts * 3_072,
            own_tokens=3_072,
        )

    predicted = correction.prompt_seconds(by_cost(tokens), tokens)
    assert predicted == pytest.approx(slowness * by_cost(tokens), rel=0.12)


def test_before_fold_version_6_tokens_count_in_full_at_once_and_at_every_length() -> None:
    """Kept as it was: recorded decisions were made by it."""
    before, now = LatencyModel(64, by_length=False, by_rate=False), LatencyModel(64, by_rate=False)
    for model in (before, now):
        model.learn(InstanceId("a"), predicted=0.04, observed=0.3, tokens=50)

    # Factor (2 * 0.97 + 0.3) / (2 * 0.97 + 0.04); one observation is shared half and half.
    by_cost, by_tokens = 1.0 * (1.94 + 0.3) / (1.94 + 0.04), 1_000 * 0.3 / 50
    assert before.expected_seconds(InstanceId("a"), 1.0, 1_000) == pytest.approx((by_cost + by_tokens) / 2)
    assert before.expected_prefill(InstanceId("a"), 1.0, 1_000) == before.expected_seconds(InstanceId("a"), 1.0, 1_000)
    share = 0.5 * (1 / 10) * (4 * 50 / 1_000)
    expected = by_cost + share * (by_tokens - by_cost)
    assert now.expected_seconds(InstanceId("a"), 1.0, 1_000) == pytest.approx(expected)


def test_an_instance_that_nothing_is_known_of_is_predicted_by_its_cost_model() -> None:
    model = LatencyModel(64)

    assert model.expected_seconds(InstanceId("new"), 1.5, 100) == 1.5
    assert model.correction(InstanceId("new")) == 1.0


@given(
    st.lists(st.tuples(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30), st.integers(0, 2**40)), max_size=30),
    st.floats(0, 1e30),
    st.integers(0, 2**40),
)
def test_nothing_that_an_engine_reports_breaks_its_bounds(
    observations: list[tuple[float, float, int]], work: float, tokens: int
) -> None:
    """Four times the work, and what four of all prompts so far could take."""
    correction = Correction()
    for predicted, observed, of_tokens in observations:
        correction.learn(predicted=predicted, observed=observed, tokens=of_tokens)

    seen = sum(2 * CORRECTION_MAX * max(0.0, predicted) for predicted, _, _ in observations)
    assert isfinite(correction.seconds(work, tokens))
    assert 0 <= correction.seconds(work, tokens) <= (CORRECTION_MAX * work + FAR * seen) * (1 + 1e-9)
    assert correction.prompt_seconds(work, tokens) >= 0
    assert CORRECTION_MIN <= correction.factor <= CORRECTION_MAX


@given(st.integers(0, 2**32), st.floats(0.3, 1e3))
def test_a_speed_within_bounds_is_learned_whatever_the_lengths(seed: int, scale: float) -> None:
    """Of engines with all costs times `scale`."""
    chance = Random(seed)
    slowness = exp(chance.uniform(-1, 1))
    cost = PrefillCost(
        fixed_s=0.004 * scale, per_token_s=1e-4 * scale, per_token_squared_s=3e-9 * scale, floor_s=0.03 * scale
    )
    correction = Correction()
    for _ in range(60):
        tokens = chance.randint(50, 20_000)
        work = cost.seconds(tokens, 0)
        correction.learn(predicted=work, observed=slowness * work, tokens=tokens)

    assert correction.seconds(cost.seconds(5_000, 0), 5_000) == pytest.approx(
        slowness * cost.seconds(5_000, 0), rel=0.25
    )
