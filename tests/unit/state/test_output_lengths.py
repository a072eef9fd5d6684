"""Expected lengths of answers: against answers of known lengths, and properties under any history."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import Tenant
from pointsman.state.output_lengths import TENANTS_MAX, OutputLengths

A, B, NEW = Tenant("a"), Tenant("b"), Tenant("new")
LONG = 32_000


def learned(*answers: tuple[Tenant, int, int]) -> OutputLengths:
    lengths = OutputLengths()
    for tenant, tokens, cap in answers:
        lengths.learn(tenant, tokens, cap)
    return lengths


def test_without_answers_the_mean_is_256_cut_at_the_cap() -> None:
    lengths = OutputLengths()

    assert lengths.expected(A, LONG) == pytest.approx(256)
    assert lengths.expected(A, 1) == pytest.approx(1, abs=0.01)
    assert lengths.expected(A, 0) == 0


@pytest.mark.parametrize("usual", [8, 40, 180, 700, 5_000])
def test_a_tenants_usual_answer_is_found_within_a_quarter(usual: int) -> None:
    chance = Random(1)
    answers = [max(1, round(chance.lognormvariate(0, 0.4) * usual)) for _ in range(200)]

    expected = learned(*((A, tokens, LONG) for tokens in answers)).expected(A, LONG)

    assert expected == pytest.approx(fmean(answers[-50:]), rel=0.25)


@pytest.mark.parametrize("cap", [20, 100, 400, 2_000])
def test_the_cap_cuts_each_answer_and_not_the_mean(cap: int) -> None:
    """Half of the answers have 50 tokens, half 1,500: under a cap of 100 the mean is near 75, not 100."""
    answers = [50, 1_500] * 100

    expected = learned(*((A, tokens, LONG) for tokens in answers)).expected(A, cap)

    assert expected == pytest.approx(fmean(min(tokens, cap) for tokens in answers), rel=0.25)


def test_answers_that_were_cut_off_do_not_count_as_short() -> None:
    """A tenant asks for 16 tokens mostly; those that may go on take 600."""
    answers = ([(A, 16, 16)] * 3 + [(A, 600, LONG)]) * 50

    assert learned(*answers).expected(A, LONG) == pytest.approx(600, rel=0.3)


def test_a_tenant_whose_answers_always_reach_the_cap_is_expected_to_reach_it() -> None:
    assert learned(*[(A, 800, 800)] * 50).expected(A, 800) == pytest.approx(800, rel=0.05)


def test_a_new_tenant_is_taken_for_the_pools_usual_one_and_a_known_one_for_itself() -> None:
    lengths = learned(*[(A, 1_000, LONG), (A, 1_000, LONG), (A, 1_000, LONG), (B, 30, LONG)] * 50)

    assert lengths.expected(B, LONG) < 60
    assert lengths.expected(A, LONG) == pytest.approx(1_000, rel=0.25)
    assert 500 < lengths.expected(NEW, LONG) < 1_000


def test_a_change_of_answers_is_followed() -> None:
    lengths = learned(*[(A, 1_000, LONG)] * 300, *[(A, 60, LONG)] * 100)

    assert lengths.expected(A, LONG) < 150


def test_tenants_are_bounded() -> None:
    lengths = learned(*((Tenant(str(number)), 9, LONG) for number in range(TENANTS_MAX + 10)))

    assert len(lengths._tenants) == TENANTS_MAX
    assert Tenant("9") not in lengths._tenants


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(-1, 2**40), st.integers(-1, 2**40)), max_size=80),
    st.integers(-5, 2**40),
    st.integers(0, 2**20),
)
def test_it_lies_within_the_cap_and_grows_with_it(answers: list[tuple[Tenant, int, int]], cap: int, more: int) -> None:
    lengths = learned(*answers)

    for tenant in (A, NEW):
        expected = lengths.expected(tenant, cap)
        assert 0 <= expected <= max(0, cap) * (1 + 1e-9)
        assert lengths.expected(tenant, cap + more) >= expected - 1e-6 * abs(expected)
