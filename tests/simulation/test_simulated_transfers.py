"""Instances that fetch prefixes from each other, in virtual time."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.scenario import FetchPath
from pointsman.simulation.simulator import Failure, Scenario, Simulation, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest

ALONE = Scenario(instances=4, routing="pointsman")
FETCHING = replace(ALONE, transfer_tokens_per_s=170_000.0, fetch_path="direct")


@cache
def documents(count: int = 300, rate: float = 3.5) -> Sequence[WorkloadRequest]:
    return GENERATORS["long_document_qa"](count, rate=rate, chance=random.Random(1))


def ends(outcome: Outcome) -> Counter[str]:
    return Counter(row.end for row in outcome.rows)


def mean_ttft(outcome: Outcome) -> float:
    times = [row.ttft for row in outcome.rows if row.ttft is not None]
    return sum(times) / len(times)


def test_what_is_fetched_need_not_be_computed_and_comes_as_soon_as_predicted() -> None:
    alone, fetching = simulate(ALONE, documents()), simulate(FETCHING, documents())
    fetched = [row for row in fetching.rows if row.fetched_tokens]

    assert ends(alone) == ends(fetching) == {"finished": 300}
    assert (alone.fetches, fetching.fetches_failed) == (0, 0)
    assert fetching.fetches == len(fetched) > 10
    assert all(row.prompt_tokens > row.cached_tokens >= row.fetched_tokens for row in fetched)
    assert mean_ttft(fetching) < 0.9 * mean_ttft(alone)
    errors = [abs(row.predicted_ttft - row.ttft) for row in fetched]  # type: ignore[operator]
    assert sum(errors) / len(errors) < 0.5 * mean_ttft(alone)


def test_a_transfer_slower_than_computing_is_not_made() -> None:
    assert simulate(replace(ALONE, transfer_tokens_per_s=1_700.0), documents(150)).fetches == 0


def test_a_transfer_that_waits_for_no_engine_saves_more() -> None:
    engines = replace(FETCHING, fetch_path="engine")

    assert mean_ttft(simulate(FETCHING, documents())) < 0.9 * mean_ttft(simulate(engines, documents()))


@pytest.mark.parametrize("path", ["engine", "direct"])
@pytest.mark.parametrize("dies", range(3))
def test_an_instance_that_dies_in_the_middle_of_fetches_costs_no_request_its_end(dies: int, path: FetchPath) -> None:
    failures = tuple(Failure(at, dies, at + 8.0) for at in (10.0, 30.0, 50.0))
    scenario = replace(FETCHING, transfer_tokens_per_s=17_000.0, fetch_path=path, failures=failures)
    first, second = simulate(scenario, documents()), simulate(scenario, documents())

    assert first.rows == second.rows
    assert set(ends(first)) <= {"finished", "failed"}
    assert ends(first)["finished"] > 290


@pytest.mark.parametrize("policy", sorted(ROUTING_POLICIES))
def test_every_routing_policy_may_fetch(policy: str) -> None:
    scenario = replace(FETCHING, routing=policy, admission="predicted_ttft_fair", ordering="fair_edf", seed=1)
    outcome = simulate(scenario, documents(120))

    assert set(ends(outcome)) <= {"finished", "rejected"}
    assert ends(outcome)["finished"] > 60


@cache
def hot(count: int = 900, rate: float = 18.0) -> Sequence[WorkloadRequest]:
    return GENERATORS["two_hot_prefixes"](count, rate=rate, chance=random.Random(1))


def test_hot_prefixes_are_copied_to_all_instances_and_first_tokens_come_sooner() -> None:
    scenario = replace(FETCHING, fetch_path="engine")
    simulation = Simulation(scenario, hot())
    needed, ahead = simulate(replace(scenario, copies=False), hot()), simulation.run()

    assert (needed.copies, ahead.copies_failed) == (0, 0)
    assert 2 <= ahead.copies <= 2 * 3  # two prefixes; each has a first holder
    assert ends(needed) == ends(ahead) == {"finished": 900}
    assert mean_ttft(ahead) < mean_ttft(needed)
    assert all(engine.model.cache.blocks_held == 0 for engine in simulation.fleet.engines.values())


def test_without_hot_prefixes_or_without_fetches_nothing_is_copied() -> None:
    groups = GENERATORS["gsp"](400, rate=20.0, chance=random.Random(1))

    assert simulate(FETCHING, groups).copies == 0
    assert simulate(ALONE, hot(300)).copies == 0


@pytest.mark.parametrize("path", ["engine", "direct"])
def test_an_instance_that_dies_in_the_middle_of_copies_ends_them(path: FetchPath) -> None:
    failures = tuple(Failure(at, engine, at + 3.0) for engine, at in enumerate((6.0, 10.0, 14.0)))
    scenario = replace(FETCHING, transfer_tokens_per_s=40_000.0, fetch_path=path, failures=failures)
    first, second = simulate(scenario, hot(500)), simulate(scenario, hot(500))

    assert first.rows == second.rows
    assert first.copies > first.copies_failed
    assert ends(first)["finished"] > 480
