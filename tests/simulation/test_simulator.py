"""The fleet in virtual time: nothing is lost or idle, the same seed tells the same story, and scenarios bend what they
say they bend and nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestMigrated, RequestPlaced
from pointsman.contracts.requests import OUTPUT_UNBOUNDED, RequestArrived
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.simulation.event_queue import EventQueue
from pointsman.simulation.outcome import Outcome, RequestRow
from pointsman.simulation.simulated_fleet import NOTICE_SECONDS
from pointsman.simulation.simulator import Failure, Scenario, Simulation, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

POLICIES = sorted(ROUTING_POLICIES)
COST = PROFILES[DEFAULT_PROFILE].prefill_cost


class WatchedAgenda(EventQueue):
    """Looks at the simulation after every event."""

    look: Callable[[], None]

    @override
    def at(self, at: EngineSeconds, act: Callable[[EngineSeconds], None]) -> None:
        def watched(now: EngineSeconds) -> None:
            act(now)
            self.look()

        super().at(at, watched)


class Watched(Simulation):
    """A simulation that is looked at after every event."""

    def __init__(self, scenario: Scenario, requests: Sequence[WorkloadRequest]) -> None:
        agenda = WatchedAgenda()
        agenda.look = self._look
        super().__init__(scenario, requests, agenda=agenda)
        self.sent: list[tuple[EngineSeconds, InstanceId]] = []
        """When a request was placed or moved, and where to."""
        self.events: list[LogEvent] = []
        self.looks = 0

    @override
    def carry_out(self, events: list[LogEvent], now: EngineSeconds) -> None:
        self.events += events
        self.sent += [(now, e.instance) for e in events if isinstance(e, RequestPlaced | RequestMigrated)]
        super().carry_out(events, now)

    def _look(self) -> None:
        self.looks += 1
        for instance, line in self.state.workload.queues.items():
            assert line.queued_tokens >= 0
            assert line.pending_seconds >= 0
            assert line.prefill_seconds >= 0
            engine = self.fleet.engines[instance]
            if line.queued_requests and engine.alive and instance in self.state.fleet.ready:
                assert engine.model.step is not None, (
                    f"{instance} is idle at {self._agenda.now} while requests wait for it"
                )


def made(workload: str, count: int, rate: float, seed: int = 1) -> list[WorkloadRequest]:
    return GENERATORS[workload](count, rate=rate, chance=random.Random(seed))


def unrelated(count: int, *, every: EngineSeconds, tokens: int = 8192, output_tokens: int = 1) -> list[WorkloadRequest]:
    """Requests at even distances that share nothing."""
    return [
        WorkloadRequest(
            arrival_s=number * every,
            block_ids=tuple(range(1000 * number + 1, 1000 * number + 2 + tokens // 512)),
            input_length=tokens,
            output_tokens=output_tokens,
        )
        for number in range(count)
    ]


def instance(number: int) -> InstanceId:
    return InstanceId(f"engine-{number:03}")


def share_of(outcome: Outcome, number: int) -> float:
    return sum(row.instance == instance(number) for row in outcome.rows) / len(outcome.rows)


def mean_ttft(outcome: Outcome) -> float:
    return sum(row.ttft or 0.0 for row in outcome.rows) / len(outcome.rows)


def assert_in_order(row: RequestRow) -> None:
    assert row.end in ("finished", "rejected", "failed")
    assert row.ended_at is not None
    assert row.arrived_at <= row.ended_at
    if row.end == "finished":
        assert row.first_token_at is not None
        assert row.arrived_at < row.first_token_at <= row.ended_at
        assert 0 <= row.cached_tokens < row.prompt_tokens


HARD = Scenario(
    instances=3,
    prefill_only=False,
    kv_capacity_tokens=100_000,
    estimate_error=(0.5, 0.5),
    event_loss=0.1,
    load_lag_s=0.3,
    rebalancing="dualmap_pair",
    slow_instances={1: 0.5},
    failures=(Failure(at=4.0, instance=0, back_at=9.0),),
    scale_at=((8.0, 4), (12.0, 2)),
)


@cache
def hard_run(policy: str) -> tuple[Watched, Outcome]:
    """Everything that can go wrong at once, under one policy."""
    simulation = Watched(replace(HARD, routing=policy), made("chat", 150, 8.0))
    return simulation, simulation.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_goes_wrong_every_request_has_one_end_and_its_times_are_in_order(policy: str) -> None:
    simulation, outcome = hard_run(policy)

    for row in outcome.rows:
        assert_in_order(row)
    assert simulation.unfinished == 0, "each end was counted once"
    assert simulation.state.workload.requests == {}
    assert all(line.requests == 0 for line in simulation.state.workload.queues.values())
    assert simulation.looks > len(outcome.rows), "no alive instance was ever idle while requests waited for it"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_outcome(policy: str) -> None:
    _, outcome = hard_run(policy)

    again = simulate(replace(HARD, routing=policy), made("chat", 150, 8.0))

    assert again.rows == outcome.rows
    assert again.samples == outcome.samples
    assert again.instance_changes == outcome.instance_changes
    assert (again.migrations, again.decisions, again.virtual_seconds) == (
        outcome.migrations, outcome.decisions, outcome.virtual_seconds,
    )  # fmt: skip


def test_another_seed_may_give_another_outcome() -> None:
    requests = made("chat", 80, 8.0)

    outcomes = [simulate(replace(HARD, routing="min_ttft", seed=seed), requests) for seed in (1, 2)]

    assert outcomes[0].rows != outcomes[1].rows


def test_on_one_instance_the_busy_time_is_the_sum_of_the_prefills() -> None:
    outcome = simulate(Scenario(instances=1, routing="least_loaded"), unrelated(40, every=0.1))

    assert outcome.virtual_seconds == pytest.approx(40 * COST.seconds(8192, 0))
    firsts = [row.first_token_at for row in outcome.rows if row.first_token_at is not None]
    assert firsts == sorted(firsts), "first come, first served"


@pytest.mark.parametrize("policy", ["least_loaded", "min_ttft", "pointsman"])
def test_work_that_shares_nothing_is_spread_until_no_instance_is_idle(policy: str) -> None:
    """With an objective that all can meet: what is late everywhere, `pointsman` gathers in one queue."""
    outcome = simulate(Scenario(instances=4, routing=policy, slo_ttft_s=60.0), unrelated(40, every=0.0))

    assert outcome.virtual_seconds == pytest.approx(10 * COST.seconds(8192, 0))


def test_prefill_only_means_one_token() -> None:
    outcome = simulate(Scenario(instances=2), made("chat", 60, 4.0))

    assert {row.output_tokens for row in outcome.rows} == {1}
    assert all(row.ended_at == row.first_token_at for row in outcome.rows)


def test_decoding_lengthens_the_wait_for_the_first_token() -> None:
    requests = made("chat", 150, 6.0)

    alone, shared = (simulate(Scenario(instances=2, prefill_only=only), requests) for only in (True, False))

    assert mean_ttft(shared) > mean_ttft(alone) * 1.02
    assert all(row.ended_at > row.first_token_at for row in shared.rows if row.output_tokens > 1)  # type: ignore[operator]


# Failure and scale


def test_what_a_failed_instance_prefills_is_answered_elsewhere_and_what_it_decodes_is_lost() -> None:
    failure = Failure(at=6.0, instance=0, back_at=20.0)
    scenario = Scenario(instances=3, routing="least_loaded", prefill_only=False, failures=(failure,))
    simulation = Watched(scenario, unrelated(150, every=0.2, output_tokens=100))

    rows = simulation.run().rows

    lost = [row for row in rows if row.end == "failed"]
    retried = [row for row in rows if row.retries]
    assert lost
    assert retried
    for row in lost:
        assert (row.instance, row.ended_at, row.reason) == (instance(0), failure.at, "engine_failed")
        assert row.first_token_at is not None
        assert row.first_token_at <= failure.at
    for row in retried:
        assert (row.end, row.retries) == ("finished", 1), "one failure costs a request one retry"
        assert row.instance != instance(0)
    back = [at for at, to in simulation.sent if to == instance(0) and at > failure.at + NOTICE_SECONDS]
    assert back
    assert min(back) >= 20.0


def test_a_request_that_waits_for_an_instance_that_dies_is_retried_once() -> None:
    """What the dying engine's own losses let in must not be lost twice."""
    scenario = Scenario(instances=2, routing="least_loaded", failures=(Failure(at=2.0, instance=0, back_at=5.0),))

    rows = simulate(scenario, unrelated(60, every=0.1)).rows

    assert all(row.end == "finished" for row in rows)
    assert max(row.retries for row in rows) == 1


def test_a_fleet_that_never_comes_back_leaves_no_simulation_running() -> None:
    scenario = Scenario(instances=1, routing="least_loaded", event_loss=0.1, failures=(Failure(at=2.0, instance=0),))

    rows = simulate(scenario, unrelated(60, every=0.1)).rows

    assert {row.end for row in rows} <= {"finished", "rejected", "failed", "unfinished"}
    assert rows[0].end == "finished"
    assert rows[-1].end == "rejected"


@pytest.mark.parametrize("policy", ["least_loaded", "dualmap"])
def test_what_a_lagging_view_places_on_a_dead_instance_is_moved_to_a_live_one(policy: str) -> None:
    failure = Failure(at=2.0, instance=0)
    scenario = Scenario(instances=2, routing=policy, load_lag_s=3.0, failures=(failure,))
    simulation = Watched(scenario, unrelated(60, every=0.1))

    rows = simulation.run().rows

    dead = [at for at, to in simulation.sent if to == instance(0) and at > failure.at + NOTICE_SECONDS]
    assert dead, "the view still shows it"
    assert {row.end for row in rows} == {"finished"}


def test_what_waits_for_the_only_instance_when_it_is_gone_stays_unfinished() -> None:
    scenario = Scenario(instances=1, routing="least_loaded", load_lag_s=3.0, failures=(Failure(at=2.0, instance=0),))

    rows = simulate(scenario, unrelated(60, every=0.1)).rows

    unfinished = [row for row in rows if row.end == "unfinished"]
    assert unfinished
    assert all(row.ended_at is None and row.arrived_at > 2.0 for row in unfinished)


@pytest.mark.parametrize("load_lag_s", [0.0, 0.5])
def test_a_draining_instance_gets_nothing_new_and_all_requests_end(load_lag_s: float) -> None:
    scenario = Scenario(instances=2, routing="least_loaded", scale_at=((5.0, 4), (15.0, 1)), load_lag_s=load_lag_s)
    simulation = Watched(scenario, unrelated(100, every=0.25))

    outcome = simulation.run()

    assert {row.end for row in outcome.rows} == {"finished"}
    assert [size for _, size in outcome.instance_changes] == [1, 2, 3, 4, 1]
    new = {at for at, to in simulation.sent if to in (instance(2), instance(3))}
    assert new
    assert all(5.0 <= at <= 15.0 + load_lag_s for at in new)
    after = {to for at, to in simulation.sent if at > 15.0 + load_lag_s}
    assert after == {instance(0)}
    assert [known.id for known in simulation.state.fleet.instances] == [instance(0)], "the drained have left"


# Knowledge


@pytest.mark.parametrize("split", [(0, 0), (2, 2)])
def test_how_long_answers_will_be_changes_no_decision_before_one_ends(split: tuple[int, int]) -> None:
    """With a KV memory that expected answers fill."""
    scenario = Scenario(
        instances=4, routing="pointsman", prefill_only=False, split=split, kv_capacity_tokens=12_000, slo_ttft_s=60.0
    )

    def decided(output_tokens: int) -> list[LogEvent]:
        simulation = Watched(scenario, unrelated(20, every=0.0, tokens=4096, output_tokens=output_tokens))
        simulation.run()
        return [event for event in simulation.events if event.at == 0.0]

    short, long = decided(1), decided(900)

    assert sum(isinstance(event, RequestPlaced) for event in short) == 20
    assert short == long


@pytest.mark.parametrize(
    ("prefill_only", "asked", "known"), [(False, OUTPUT_UNBOUNDED, 2**31), (False, 300, 300), (True, 300, 1)]
)
def test_the_scheduler_knows_what_clients_ask_for_and_engines_generate_what_answers_have(
    prefill_only: bool, asked: int, known: int
) -> None:
    requests = [replace(one, max_output_tokens=asked) for one in unrelated(5, every=1.0, tokens=512, output_tokens=7)]
    simulation = Watched(Scenario(instances=1, prefill_only=prefill_only), requests)
    rows = simulation.run().rows

    arrivals = [event for event in simulation.events if isinstance(event, RequestArrived)]
    assert [event.max_output_tokens for event in arrivals] == [known] * 5
    assert [row.output_tokens for row in rows] == [1 if prefill_only else 7] * 5


def test_lost_events_are_healed() -> None:
    scenario = Scenario(instances=3, routing="min_ttft", event_loss=0.3, kv_capacity_tokens=40_000, prefill_only=False)
    simulation = Simulation(scenario, made("chat", 200, 6.0))
    simulation.run()

    simulation.fleet.report(simulation._agenda.now + 1.0)

    index = simulation.state.index
    for engine in simulation.fleet.engines.values():
        assert index.keys(engine.id) == engine.model.cache.cached()
        assert simulation.state.fleet[engine.id].doubt == ""
    assert sum(engine.sequence for engine in simulation.fleet.engines.values()) > 200


def test_events_that_are_late_are_known_late() -> None:
    prompt = unrelated(1, every=0.0)[0]
    requests = [replace(prompt, arrival_s=at) for at in (0.0, 6.0, 20.0)]

    rows = simulate(Scenario(instances=1, routing="min_ttft", event_delay_s=10.0), requests).rows

    assert [row.cached_tokens for row in rows] == [0, 7680, 7680], "the engine knows at once"
    assert [row.predicted_cached_tokens for row in rows] == [0, 0, 7680]


def test_a_view_that_lags_makes_the_least_wait_a_herd() -> None:
    burst = unrelated(16, every=0.01)

    fresh, lagging = (simulate(Scenario(instances=4, routing="min_ttft", load_lag_s=lag), burst) for lag in (0.0, 0.5))

    assert max(share_of(fresh, number) for number in range(4)) == 0.25
    assert max(share_of(lagging, number) for number in range(4)) > 0.9


def test_wrong_estimates_change_predictions_and_not_what_engines_take() -> None:
    requests = made("chat", 60, 4.0)

    right, wrong = (
        simulate(Scenario(instances=1, routing="min_ttft", estimate_error=error), requests)
        for error in ((0.0, 0.0), (0.5, 0.5))
    )

    assert [row.first_token_at for row in right.rows] == [row.first_token_at for row in wrong.rows]
    differing = sum(a.predicted_ttft != b.predicted_ttft for a, b in zip(right.rows, wrong.rows, strict=True))
    assert differing > len(requests) / 3


def test_a_slow_instance_is_found_out_and_given_less() -> None:
    scenario = Scenario(instances=3, routing="min_ttft", slow_instances={0: 0.5})

    outcome = simulate(scenario, unrelated(150, every=0.36))

    assert share_of(outcome, 0) < 0.8 * min(share_of(outcome, 1), share_of(outcome, 2))


# Rebalancing


def test_a_hot_pair_sheds_requests_and_those_that_moved_finish() -> None:
    requests = made("two_hot_prefixes", 200, 14.0)
    scenario = Scenario(instances=4, routing="dualmap", load_lag_s=0.5, rebalancing="dualmap_pair")

    outcome = simulate(scenario, requests)

    moved = [row for row in outcome.rows if row.migrations]
    assert moved
    assert outcome.migrations == sum(row.migrations for row in moved)
    assert {row.end for row in outcome.rows} == {"finished"}
