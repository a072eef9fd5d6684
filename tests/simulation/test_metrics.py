"""What is made of an outcome: who counts, over which time, and what a search for goodput may cost."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import InstanceId
from pointsman.simulation.goodput import RUNS_MAX, Goodput, RatePoint, find_goodput
from pointsman.simulation.metrics import (
    Attainment,
    Window,
    answer_tokens,
    demand_by_tenant,
    jain_index,
    length_bands,
    load_cv,
    percentile,
    service_against_fair_share,
    service_by_tenant,
    summarise,
    tpot,
)
from pointsman.simulation.outcome import End, LoadSample, Outcome, RequestRow

PAIR = (InstanceId("engine-0"), InstanceId("engine-1"))


def row(
    number: int,
    ttft: float | None = 1.0,
    *,
    tenant: str = "",
    prompt: int = 1000,
    cached: int = 0,
    end: End = "finished",
    predicted: float | None = None,
) -> RequestRow:
    """Arrives at second `number`; its answer takes one second for 11 tokens."""
    first = None if ttft is None else number + ttft
    return RequestRow(
        number=number,
        tenant=tenant,
        arrived_at=float(number),
        prompt_tokens=prompt,
        output_tokens=11,
        slo_ttft=5.0,
        end=end,
        predicted_ttft=predicted,
        cached_tokens=cached,
        first_token_at=first,
        ended_at=None if first is None else first + 1.0,
    )


def sample(at: float, *pending: int) -> LoadSample:
    return LoadSample(at, pending, (0,) * len(pending), PAIR[: len(pending)])


def test_whatever_is_not_on_time_counts_as_missed() -> None:
    ends: tuple[End, ...] = ("rejected", "failed", "unfinished")
    rows = [row(0), row(1, 5.0), row(2, 5.1), *(row(3 + n, None, end=end) for n, end in enumerate(ends))]

    report = summarise(Outcome(rows))

    assert report.effective_capacity == pytest.approx(2 / 6)
    assert (report.finished, report.rejections, report.failures, report.unfinished) == (3, 1, 1, 1)
    assert report.ttft.p50_s == 5.0
    assert report.tpot.p90_s == pytest.approx(0.1)
    assert report.e2e.p50_s == 6.0


def test_the_warm_up_is_in_no_figure() -> None:
    cold = [row(n, 50.0, tenant="cold", prompt=9000) for n in range(3)]
    samples = [sample(0.0, 900, 0), sample(1.0, 900, 0), sample(3.0, 10, 10), sample(4.0, 10, 10), sample(90.0, 9, 0)]

    report = summarise(Outcome([*cold, row(3), row(4)], samples), warmup=3)

    assert (report.requests, report.effective_capacity, report.load_cv) == (2, 1.0, 0.0)
    assert list(report.by_tenant) == [""]
    assert {band.tokens_max for band in report.by_length} == {1000}


def test_the_hit_rate_weighs_tokens_of_what_was_served_and_is_held_against_the_bound() -> None:
    rows = [row(0, prompt=3000, cached=1500), row(1, prompt=1000), row(2, None, prompt=8000, end="rejected")]

    report = summarise(Outcome(rows), hit_bound=0.5)

    assert report.hit_rate == 0.375
    assert report.hit_share_of_bound == 0.75


def test_variation_holds_until_the_next_sample_and_idle_moments_have_none() -> None:
    samples = [sample(0.0, 100, 0), sample(3.0, 50, 50), sample(4.0, 0, 0), sample(9.0, 1, 0)]

    assert load_cv(samples) == pytest.approx((3 * 1.0 + 1 * 0.0) / 4)
    assert load_cv(samples[2:]) is None


def test_service_counts_what_engines_computed_within_the_window() -> None:
    rows = [row(0, tenant="a", cached=400), row(1, 8.5, tenant="b"), row(2, 90.0, tenant="c"), row(10, tenant="a")]

    assert service_by_tenant(rows, Window(0.0, 10.0)) == {"a": 600.0 + 2 * 11, "b": 1000.0 + 0.5 * 2 * 11, "c": 0.0}
    assert service_by_tenant(rows, Window(1.0, 9.0)) == {"a": 2 * 11, "b": 0.0, "c": 0.0}


def test_throughput_counts_cached_tokens_too() -> None:
    rows = [row(0, tenant="a", cached=400), row(1, 8.5, tenant="b"), row(2, None, end="rejected"), row(10, tenant="a")]

    assert summarise(Outcome(rows)).tokens_per_s == pytest.approx((1000 + 11 + 1000 + 0.5 * 11) / 10)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 900)), min_size=1, max_size=20), st.floats(0.0, 60.0))
def test_adjoining_windows_share_out_all_service_and_what_is_left_is_demand(
    requests: list[tuple[float, int]], cut: float
) -> None:
    rows = [row(number, ttft, prompt=prompt) for number, (ttft, prompt) in enumerate(requests)]
    whole, first, second = Window(-1.0, 100.0), Window(-1.0, cut), Window(cut, 100.0)

    parts = service_by_tenant(rows, first)[""] + service_by_tenant(rows, second)[""]

    assert parts == pytest.approx(service_by_tenant(rows, whole)[""])
    assert demand_by_tenant(rows, second)[""] == pytest.approx(service_by_tenant(rows, second)[""])


def test_what_the_warm_up_left_behind_is_served_in_the_window_and_counts() -> None:
    """A client of which only older requests are served has not got nothing."""
    old = [row(number, 10.0, tenant="greedy") for number in range(5)]
    new = [
        row(5 + number, 100.0 if number < 3 else 1.0, tenant="greedy" if number < 3 else "new") for number in range(9)
    ]

    report = summarise(Outcome([*old, *new]), warmup=5)

    assert report.jain == pytest.approx(1.0, abs=0.05)


def test_an_answer_that_ends_with_its_first_token_has_only_that_one() -> None:
    short = replace(row(0), ended_at=1.0)

    assert (answer_tokens(short), tpot(short)) == (1, None)
    assert answer_tokens(row(0, end="failed")) == 0


def test_jains_index_runs_from_one_of_n_to_one() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == 1.0
    assert jain_index([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([0.0]) is None


def test_who_asks_for_little_and_gets_it_is_not_wronged() -> None:
    demand = {"greedy": 900.0, "hungry": 600.0, "modest": 100.0}

    fair = service_against_fair_share({"greedy": 400.0, "hungry": 400.0, "modest": 100.0}, demand)
    unfair = service_against_fair_share({"greedy": 800.0, "hungry": 0.0, "modest": 100.0}, demand)

    assert fair == [1.0, 1.0, 1.0]
    assert unfair == [1.0, 0.0, 2.0]
    assert service_against_fair_share({"idle": 0.0}, {"idle": 0.0}) == []


def test_demand_is_what_was_asked_for_whether_or_not_it_was_served() -> None:
    rows = [row(0, tenant="a", cached=400), row(1, None, tenant="b", end="rejected")]

    assert demand_by_tenant(rows, Window(-1.0, 2.0)) == {"a": 600.0 + 22, "b": 1000.0 + 22}


def test_who_waits_wants_all_of_it_and_who_is_being_answered_no_more_than_comes() -> None:
    waiting, answered = row(0, 8.0, tenant="waiting"), row(0, 4.5, tenant="answered")

    demand = demand_by_tenant([waiting, answered], Window(0.0, 5.0))

    assert demand == {"answered": 1000.0 + 0.5 * 22, "waiting": 1000.0 + 22}


def test_nobody_wants_any_more_what_was_refused_before() -> None:
    refused = replace(row(0, None, tenant="a", end="rejected"), ended_at=0.0)
    rows = [refused, row(1, tenant="b"), row(9, tenant="c")]

    assert demand_by_tenant(rows, Window(0.5, 5.0)) == {"a": 0.0, "b": 1000.0 + 22, "c": 0.0}


def test_well_behaved_clients_are_looked_at_alone() -> None:
    rows = [row(0, 1.0, tenant="good"), row(1, 9.0, tenant="greedy")]

    report = summarise(Outcome(rows), misbehaving={"greedy"})

    assert report.well_behaved_ttft.p99_s == 1.0
    assert report.by_tenant == {"good": Attainment(requests=1, share=1.0), "greedy": Attainment(requests=1, share=0.0)}


def test_predictions_are_held_against_what_came() -> None:
    outcome = Outcome([row(0, 2.0, predicted=1.0), row(1, 2.0, predicted=4.0), row(2)])
    outcome.decisions, outcome.decision_seconds = 3, 0.0003

    report = summarise(outcome)

    assert (report.prediction_error_p50_s, report.prediction_bias_s) == (1.5, -0.5)
    assert report.decision_us == pytest.approx(100.0)


def test_a_run_without_requests_has_no_numbers_and_no_crash() -> None:
    report = summarise(Outcome([]))

    assert report.effective_capacity is report.load_cv is report.jain is report.hit_rate is None
    assert report.by_length == ()


@given(st.lists(st.integers(min_value=1, max_value=50), max_size=60))
def test_length_bands_split_the_requests_evenly_from_short_to_long(lengths: list[int]) -> None:
    bands = length_bands([row(number, prompt=length) for number, length in enumerate(lengths)])

    sizes = [band.attainment.requests for band in bands]
    assert sum(sizes) == len(lengths)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert [band.tokens_max for band in bands] == sorted(band.tokens_max for band in bands)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([], 50) is None


# --- Goodput ---


def searched(
    capacity_at: Callable[[float], float], start: float = 4.0, known: tuple[RatePoint, ...] = ()
) -> tuple[Goodput, list[float]]:
    asked: list[float] = []

    def asking(qps: float) -> float:
        asked.append(qps)
        return capacity_at(qps)

    return find_goodput(asking, start_qps=start, known=known), asked


@given(st.floats(min_value=1.0, max_value=40.0), st.floats(min_value=1.0, max_value=20.0))
def test_the_search_finds_where_capacity_falls_below_the_target(truth: float, start: float) -> None:
    found, asked = searched(lambda qps: 1.0 if qps <= truth else 0.5, start)

    assert truth / 1.05 <= found.qps <= truth
    assert len(asked) <= RUNS_MAX


def test_a_sweep_that_brackets_the_rate_saves_runs() -> None:
    sweep = (RatePoint(6.0, 0.95), RatePoint(6.2, 0.8))
    found, asked = searched(lambda qps: 1.0 if qps <= 6.1 else 0.5, known=sweep)

    assert 6.0 <= found.qps <= 6.1
    assert all(6.0 < qps < 6.2 for qps in asked)
    assert set(sweep) <= set(found.points)


def test_beyond_the_first_rate_that_misses_nothing_counts() -> None:
    found, _ = searched(lambda qps: 0.5 if 5.0 < qps < 7.0 else 1.0, start=8.0, known=(RatePoint(6.0, 0.5),))

    assert found.qps <= 5.0


def test_a_search_that_never_misses_or_never_meets_says_so() -> None:
    endless, runs = searched(lambda _: 1.0)
    hopeless, _ = searched(lambda _: 0.0)

    assert endless.at_least
    assert len(runs) == RUNS_MAX
    assert (hopeless.qps, hopeless.at_least) == (0.0, False)
