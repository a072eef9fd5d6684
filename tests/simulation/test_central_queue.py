"""The bound: what one queue and one shared cache would give, and that it is one."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_lab.results.central_queue import central_queue
from tests.support.examples import examples

COST = PROFILES[DEFAULT_PROFILE].prefill_cost
OVERLOADED = GENERATORS["long_document_qa"](120, rate=8.0, chance=random.Random(5))
POOL = Scenario(instances=3)


def mean_ttft(outcome: Outcome) -> float:
    ttfts = [row.ttft for row in outcome.rows if row.ttft is not None]
    assert len(ttfts) == len(outcome.rows)
    return sum(ttfts) / len(ttfts)


def on_time(outcome: Outcome) -> int:
    return sum(row.on_time for row in outcome.rows)


def attained(outcome: Outcome, tokens: int = 0) -> float:
    """The share on time, of all or of prompts of one length."""
    chosen = [row.on_time for row in outcome.rows if tokens in (0, row.prompt_tokens)]
    return sum(chosen) / len(chosen)


def at_once(lengths: Sequence[int]) -> list[WorkloadRequest]:
    """Requests that arrive together and share nothing."""
    return [
        WorkloadRequest(
            arrival_s=0.0,
            block_ids=tuple(range(1000 * number + 1, 1000 * number + 2 + length // 512)),
            input_length=length,
            output_tokens=1,
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("policy", sorted(ROUTING_POLICIES))
def test_no_policy_has_an_earlier_mean_first_token(policy: str) -> None:
    bound = mean_ttft(central_queue(POOL, OVERLOADED, "fcfs"))

    routed = simulate(Scenario(instances=3, routing=policy), OVERLOADED)

    assert bound > POOL.slo_ttft_s, "the workload is to overload the pool"
    assert bound <= mean_ttft(routed)


@pytest.mark.parametrize("workload", ["chat", "long_document_qa", "tools", "gsp_mixed"])
@pytest.mark.parametrize("rate", [4.0, 12.0])
def test_most_on_time_serves_at_least_as_many_on_time_as_fcfs(workload: str, rate: float) -> None:
    requests = GENERATORS[workload](150, rate=rate, chance=random.Random(1))

    most = on_time(central_queue(POOL, requests, "most_on_time"))

    assert most >= on_time(central_queue(POOL, requests, "fcfs")) - 1, "it is a heuristic on three engines"


@examples(40)
@given(lengths=st.lists(st.integers(600, 8_000), min_size=1, max_size=6), slo=st.floats(0.2, 4.0))
@example(lengths=[600, 2271, 5322], slo=0.96875)
def test_on_one_instance_most_on_time_finds_what_trying_every_order_finds(lengths: list[int], slo: float) -> None:
    """One fewer where a full step computes a part of a prompt, which delays the others in it."""
    scenario = Scenario(instances=1, slo_ttft_s=slo)

    served = on_time(central_queue(scenario, at_once(lengths), "most_on_time"))

    full_steps = sum(lengths) // scenario.max_num_batched_tokens
    assert served >= max(_on_time_in_order(order, slo) for order in permutations(lengths)) - min(1, full_steps)


def test_a_floor_is_kept_and_costs_some_of_the_others() -> None:
    chance = random.Random(4)
    lengths = [chance.choice((2000, 3000, 4000, 20_000)) for _ in range(800)]
    requests = [replace(one, arrival_s=number / 14.0) for number, one in enumerate(at_once(lengths))]

    free = central_queue(Scenario(), requests, "most_on_time")
    fair = central_queue(Scenario(), requests, "most_on_time", decile_floor=0.6)

    assert attained(free, 20_000) < 0.55 * attained(free)
    assert attained(fair, 20_000) >= 0.57 * attained(fair), "a short run ends a little below"
    assert 0.8 * attained(free) < attained(fair) < attained(free)


def test_prefills_share_a_step_and_have_their_first_tokens_at_its_end() -> None:
    outcome = central_queue(Scenario(instances=1), at_once([100] * 20), "fcfs")

    computing = 20 * (COST.per_token_s * 100 + COST.per_token_squared_s * 100**2)
    assert {row.ttft for row in outcome.rows} == {outcome.virtual_seconds}
    assert outcome.virtual_seconds == pytest.approx(computing + COST.fixed_s)


def test_a_step_ends_at_the_tokens_of_a_batch_and_a_prompt_goes_on_in_the_next() -> None:
    outcome = central_queue(Scenario(instances=1), at_once([5000, 5000, 3000]), "fcfs")

    first, second, third = (row.first_token_at or 0.0 for row in outcome.rows)
    assert first > COST.seconds(5000, 0) + 0.2, "its step also has 3,192 tokens of the second"
    assert first < second == third


def test_only_what_cannot_be_on_time_any_more_is_dropped() -> None:
    outcome = central_queue(Scenario(instances=2), at_once([4000, 12_000, 8000] * 8), "most_on_time")

    dropped = [row for row in outcome.rows if row.end == "rejected"]
    assert 0 < len(dropped) < len(outcome.rows)
    assert all(row.on_time for row in outcome.rows if row.end == "finished")
    for row in dropped:
        assert row.ended_at is not None
        assert row.ended_at + COST.seconds(row.prompt_tokens, 0) > row.slo_ttft


def test_documents_that_are_late_even_alone_can_be_served_for_their_later_questions() -> None:
    document = at_once([29_696])[0]
    again = [replace(document, arrival_s=30.0 * number) for number in range(6)]

    assert on_time(central_queue(POOL, again, "most_on_time")) == 0
    assert on_time(central_queue(POOL, again, "most_on_time", late="served last")) == 5


def test_foresight_keeps_what_will_be_asked_again() -> None:
    once, again = at_once([9000, 9000])
    arrivals = [once, again, *(replace(again, arrival_s=2.0 + 0.1 * number) for number in range(4))]
    scenario = Scenario(instances=1, slo_ttft_s=1.5)

    wise = central_queue(scenario, arrivals, "most_on_time")
    blind = central_queue(scenario, arrivals, "most_on_time", foresight=False)

    assert [row.on_time for row in wise.rows] == [False, *[True] * 5]
    assert on_time(blind) <= on_time(wise)


def test_the_cache_is_shared_and_bounded() -> None:
    first, other = at_once([8192, 8192])
    again = [first, first, other, first]

    whole = central_queue(Scenario(instances=1), again, "fcfs")
    small = central_queue(Scenario(instances=1, kv_capacity_tokens=8192), again, "fcfs")

    assert [row.cached_tokens for row in whole.rows] == [0, 7680, 0, 7680], "the last token is always computed"
    assert [row.cached_tokens for row in small.rows] == [0, 7680, 0, 0]


def _on_time_in_order(lengths: Sequence[int], slo: float) -> int:
    """How many are on time when each is served in turn unless it would be late."""
    now, served = 0.0, 0
    for length in lengths:
        done = now + COST.seconds(length, 0)
        if done <= slo:
            now, served = done, served + 1
    return served
