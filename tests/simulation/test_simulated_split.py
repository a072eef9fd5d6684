"""Prefill and decode on instances of their own, in virtual time: what Mooncake promises of it, and that nothing is lost."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import quantiles

import pytest

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import Failure, Scenario, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest

WHOLE = Scenario(instances=4, routing="min_ttft", prefill_only=False)
SPLIT = Scenario(instances=4, routing="min_ttft", prefill_only=False, split=(2, 2))
INSTANCE_NAMES = ["engine-000", "engine-001", "engine-002", "engine-003"]


@cache
def chats(count: int = 300, rate: float = 5.0) -> Sequence[WorkloadRequest]:
    return GENERATORS["chat"](count, rate=rate, chance=random.Random(1))


def ends(outcome: Outcome) -> Counter[str]:
    return Counter(row.end for row in outcome.rows)


def slow_token(outcome: Outcome) -> float:
    """Seconds per token that nine in ten answers stay below."""
    served = [row for row in outcome.rows if row.end == "finished" and row.output_tokens > 1]
    times = [(row.ended_at - row.first_token_at) / (row.output_tokens - 1) for row in served]  # type: ignore[operator]
    return quantiles(times, n=10)[-1]


def test_tokens_come_faster_where_no_prefill_comes_between_them() -> None:
    whole, split = simulate(WHOLE, chats()), simulate(SPLIT, chats())

    assert ends(whole) == ends(split) == {"finished": 300}
    assert slow_token(split) < 0.9 * slow_token(whole)


def test_answers_come_from_those_that_decode_and_hits_are_those_of_the_prefill() -> None:
    outcome = simulate(SPLIT, chats())

    assert {row.instance for row in outcome.rows} == {"engine-002", "engine-003"}
    assert all(row.cached_tokens < row.prompt_tokens for row in outcome.rows)
    assert sum(row.cached_tokens for row in outcome.rows) > 0.3 * sum(row.prompt_tokens for row in outcome.rows)


@pytest.mark.parametrize("policy", sorted(ROUTING_POLICIES))
def test_every_routing_policy_works_in_front_of_a_split(policy: str) -> None:
    scenario = Scenario(instances=5, routing=policy, admission="predicted_ttft_fair", split=(2, 2), prefill_only=False)
    first, second = simulate(scenario, chats(120)), simulate(scenario, chats(120))

    assert first.rows == second.rows
    assert set(ends(first)) <= {"finished", "rejected"}
    assert ends(first)["finished"] > 100


def test_too_many_answers_at_once_are_refused_for_the_time_their_tokens_would_take() -> None:
    requests = GENERATORS["chat"](400, rate=60.0, chance=random.Random(2))
    outcome = simulate(Scenario(instances=4, routing="min_ttft", split=(3, 1), prefill_only=False), requests)

    assert Counter(row.reason for row in outcome.rows if row.end == "rejected").keys() == {"slo_tpot"}
    assert slow_token(outcome) < 0.15


@pytest.mark.parametrize("dies", range(4))
def test_an_instance_that_dies_costs_no_request_its_end(dies: int) -> None:
    failing = Scenario(
        instances=4, routing="min_ttft", prefill_only=False, split=(2, 2), failures=(Failure(10.0, dies, 20.0),)
    )
    outcome = simulate(failing, chats())

    assert set(ends(outcome)) <= {"finished", "failed", "rejected"}
    assert ends(outcome)["finished"] > 250
    assert INSTANCE_NAMES[dies] in {row.instance for row in outcome.rows} or dies < 2
