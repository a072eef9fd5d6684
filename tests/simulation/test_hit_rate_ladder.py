"""Each rung of the hit-rate ladder within a point of the truth: of simulated runs, whose engines' caches are known."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_figures import Rung, Tally
from pointsman.primitives import BlockKey, Tenant, Tokens
from pointsman.simulation.scenario import FleetMirror, block_keys
from pointsman.simulation.simulator import Failure, Scenario
from pointsman.simulation.workload import GENERATORS, WorkloadRequest
from tests.support.ladder_truth import RUNGS, TrueRequest, WatchedCaches, shares

POINT = 0.01
HOUR = 3600.0


def requests_of(workload: str, count: int, rate: float) -> list[WorkloadRequest]:
    return GENERATORS[workload](count, rate=rate, chance=random.Random(3))


def climbed(run: WatchedCaches, entries: int = 0) -> HitRateLadder:
    """The ladder of a run's log, from a checkpoint after so many entries."""
    state = run.state_before(entries)
    ladder = HitRateLadder(state.settings)
    ladder.begin(state)
    for sequence, event in enumerate(run.log[entries:], entries + 1):
        state.apply(event, sequence)
        ladder.apply(event, state)
    ladder.settle(state)
    return ladder


def assert_true(tally: Tally, truth: Sequence[TrueRequest], within: float = POINT) -> None:
    assert tally.requests == len(truth)
    true = shares(truth)
    wrong = {
        rung: (tally.share(Rung(rung)), true[rung])
        for rung in RUNGS
        if abs(tally.share(Rung(rung)) - true[rung]) > within
    }
    assert wrong == {}, f"{true}"


RUNS: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "roomy": ("chat", 400, 8.0, {"routing": "pointsman", "kv_capacity_tokens": 200_000}),
    "evicting": ("chat", 600, 8.0, {"routing": "least_loaded", "kv_capacity_tokens": 20_000}),
    "spread": ("gsp", 600, 8.0, {"routing": "random", "kv_capacity_tokens": 60_000}),
    "bursts, small blocks": ("two_hot_prefixes", 400, 12.0, {"routing": "round_robin", "kv_capacity_tokens": 30_000, "block_tokens": 64}),
    "generated blocks": ("tools", 500, 6.0, {"routing": "pointsman", "kv_capacity_tokens": 40_000, "prefill_only": False}),
    "long queues": ("long_document_qa", 250, 2.0, {"routing": "dualmap", "kv_capacity_tokens": 40_000}),
    "another eviction": ("tree_of_thoughts", 400, 6.0, {"routing": "min_ttft", "kv_capacity_tokens": 30_000, "eviction": "rlt"}),
    "moved": ("two_hot_prefixes", 400, 12.0, {"routing": "dualmap", "kv_capacity_tokens": 40_000, "rebalancing": "dualmap_pair"}),
    "stale by 3 s": ("chat", 600, 8.0, {"routing": "pointsman", "kv_capacity_tokens": 20_000, "event_delay_s": 3.0}),
    "some events lost": ("gsp", 600, 8.0, {"routing": "pointsman", "kv_capacity_tokens": 60_000, "event_loss": 0.02}),
    "an engine fails": ("chat", 500, 8.0, {"routing": "least_loaded", "kv_capacity_tokens": 30_000, "failures": (Failure(20.0, 1, 40.0),)}),
    "split": ("chat", 300, 6.0, {"routing": "pointsman", "kv_capacity_tokens": 60_000, "split": (2, 2), "prefill_only": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_each_rung_is_within_a_point_of_the_truth(name: str) -> None:
    workload, count, rate, settings = RUNS[name]
    run = WatchedCaches(Scenario(instances=4, **settings), requests_of(workload, count, rate))
    run.run()

    assert_true(climbed(run).figures.ever, run.finished())


def test_caches_emptied_behind_everybodys_back_lose_what_they_held_and_not_the_index() -> None:
    run = WatchedCaches(
        Scenario(instances=4, kv_capacity_tokens=60_000, routing="pointsman"), requests_of("gsp", 800, 8.0)
    )
    run.empty_at = [(20.0 * (number + 1), number) for number in range(4)]
    run.run()
    truth = run.finished()
    tally = climbed(run).figures.ever

    assert shares(truth)["known"] - shares(truth)["perfect"] > 5 * POINT
    assert_true(tally, truth)
    missed = tally.missed_tokens / tally.prompt_tokens
    assert missed == pytest.approx(shares(truth)["chosen"] - shares(truth)["delivered"], abs=POINT)


GROUPS = {Tenant("a"): 1, Tenant("b"): 1, Tenant("c"): 2}


def salted(request: WorkloadRequest, block_tokens: Tokens) -> list[BlockKey]:
    """As with a `cache_salt` for each group."""
    return [BlockKey(key ^ GROUPS[request.tenant] * 0x1234_5678_9ABC) for key in block_keys(request, block_tokens)]


def test_nothing_is_shared_across_cache_groups() -> None:
    tenants = list(GROUPS)
    requests = [replace(r, tenant=tenants[n % 3]) for n, r in enumerate(requests_of("gsp", 600, 8.0))]
    scenario = Scenario(instances=3, kv_capacity_tokens=100_000, routing="pointsman")
    shared, isolated = WatchedCaches(scenario, requests), WatchedCaches(scenario, requests, FleetMirror(keys_of=salted))
    shared.run()
    isolated.run()
    ladder = climbed(isolated)

    assert climbed(shared).figures.ever.share(Rung.UNBOUNDED) > ladder.figures.ever.share(Rung.UNBOUNDED) + POINT
    assert_true(ladder.figures.ever, isolated.finished())
    found = dict(ladder.figures.tenants())
    assert set(found) == set(GROUPS)
    for tenant, tally in found.items():
        assert_true(tally, [request for request in isolated.finished() if request.tenant == tenant])


def test_a_request_counts_in_the_hour_of_its_placement() -> None:
    run = WatchedCaches(
        Scenario(instances=2, kv_capacity_tokens=20_000, routing="pointsman"), requests_of("chat", 500, 0.05)
    )
    run.run()
    truth = sorted(run.finished(), key=lambda request: request.at)
    hours = {int(hour): list(group) for hour, group in groupby(truth, key=lambda request: request.at // HOUR)}
    found = climbed(run).figures.hours()

    assert [begin for begin, _ in found] == [int(hour * HOUR) for hour in hours]
    assert len(found) > 2
    for (_, tally), group in zip(found, hours.values(), strict=True):
        assert_true(tally, group)


@pytest.mark.parametrize("capacity", [30_000, 200_000])
def test_a_log_that_lost_its_beginning_counts_from_a_checkpoint(capacity: int) -> None:
    run = WatchedCaches(
        Scenario(instances=4, kv_capacity_tokens=capacity, routing="pointsman"), requests_of("chat", 600, 8.0)
    )
    run.begins_with = 300
    run.run()

    assert 0 < run.log_begins < len(run.log)
    assert_true(climbed(run, run.log_begins).figures.ever, run.finished())


def test_without_a_checkpoint_what_engines_deliver_is_still_true() -> None:
    run = WatchedCaches(
        Scenario(instances=4, kv_capacity_tokens=200_000, routing="pointsman"), requests_of("chat", 600, 8.0)
    )
    run.begins_with = 300
    run.run()
    ladder = HitRateLadder(run.state_before(0).settings)
    state = run.state_before(0)
    ladder.begin(state)
    for sequence, event in enumerate(run.log[run.log_begins :], run.log_begins + 1):
        state.apply(event, sequence)
        ladder.apply(event, state)
    ladder.settle(state)
    tally, true = ladder.figures.ever, shares(run.finished())

    assert tally.share(Rung.DELIVERED) == pytest.approx(true["delivered"])
    assert tally.share(Rung.CHOSEN) == pytest.approx(true["chosen"])
    assert tally.share(Rung.DELIVERED) <= tally.share(Rung.PERFECT) <= true["perfect"] + POINT
    assert tally.share(Rung.PERFECT) <= tally.share(Rung.UNBOUNDED) <= true["unbounded"] + POINT
