"""A fleet that runs and the simulator, given the same requests: the same latencies and the same hits."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import FleetMirror, Scenario, simulate
from pointsman.simulation.workload import TRACE_BLOCK_TOKENS, WorkloadRequest
from pointsman.simulation.workload.arrivals import poisson
from pointsman_cli.bench.load import LoadGenerator, Target
from pointsman_lab.agreement import runner
from pointsman_lab.agreement.command import exit_code
from pointsman_lab.agreement.machine import Heartbeat, Machine
from pointsman_lab.agreement.runner import Figures, Pool, pace, run_live, run_simulated
from pointsman_lab.agreement.verdict import Agreement, Verdict, numbers, verdict

TOLERANCE = 0.1
WARMUP = 10
CONVERSATIONS, TURNS = 18, 3
TURN_TOKENS = 5000
LOAD = 0.5

SERVED = {"requests": 9, "completed": 9, "rejected": 0, "failed": 0, "ttft_p99_s": 3.0, "tpot_p50_s": None}


def conversations(chance: random.Random) -> list[WorkloadRequest]:
    """Each turn brings new tokens behind those of the turns before; all first turns come before all second ones."""
    requests = []
    for turn in range(1, TURNS + 1):
        for conversation in chance.sample(range(CONVERSATIONS), CONVERSATIONS):
            length = turn * TURN_TOKENS + 37 * conversation
            first = 1 + 1000 * conversation
            blocks = tuple(range(first, first - (-length // TRACE_BLOCK_TOKENS)))
            requests.append(WorkloadRequest(arrival_s=0.0, block_ids=blocks, input_length=length, output_tokens=1))
    return requests


@pytest.mark.quiet
async def test_a_running_fleet_and_the_simulator_agree_on_ttft_and_hit_rate() -> None:
    pool = Pool(routing="pointsman", engines=2)
    asked = conversations(random.Random(1))
    paced = pace(pool, poisson(asked, rate=1.0, chance=random.Random(1)), warmup=WARMUP)
    requests = poisson(asked, rate=LOAD * paced.saturation, chance=random.Random(2))

    simulated = run_simulated(pool, requests, speed=paced.speed, warmup=WARMUP)
    live, machine = await run_live(pool, requests, speed=paced.speed, warmup=WARMUP, tick=lambda _tally: None)

    compared = numbers(live, simulated, TOLERANCE)
    found = verdict(compared, disturbed=machine.disturbed(paced.prefill_p50_s))
    if found == "not judged":
        figures = "; ".join(map(str, compared))
        pytest.skip(f"this machine is too busy to keep engine time at speed {paced.speed:g}: {machine}; {figures}")
    assert live.completed == len(requests) - WARMUP
    assert found == "agree", "\n".join(map(str, [*compared, machine]))


def test_simulated_clients_ask_for_as_many_tokens_as_those_of_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both schedulers know as much of the answers."""
    answers = (1, 40, 300, 0)
    requests = [
        replace(one, output_tokens=answers[n % 4]) for n, one in enumerate(conversations(random.Random(1))[:24])
    ]
    simulated: list[int] = []

    def watched(scenario: Scenario, asked: Sequence[WorkloadRequest], *, mirror: FleetMirror) -> Outcome:
        simulated.extend(request.max_output_tokens for request in asked)
        return simulate(scenario, asked, mirror=mirror)

    monkeypatch.setattr(runner, "simulate", watched)
    run_simulated(Pool(routing="round_robin", engines=2), requests, speed=1.0, warmup=0, simulations=1)
    load = LoadGenerator(Target(url="http://127.0.0.1:9", model="m", speed=1.0, seed=1), requests, warmup=0)

    assert simulated == [json.loads(prepared.body)["max_tokens"] for prepared in load._prepare()]


def figures(ttft_p50_s: float | None, hit_rate: float | None = 0.5) -> Figures:
    return Figures(**SERVED, ttft_p50_s=ttft_p50_s, ttft_p90_s=2.0, hit_rate=hit_rate, effective_capacity=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("live", "simulated", "disturbed", "expected"),
    [
        (figures(1.09), [figures(1.0)], False, "agree"),
        (figures(1.11), [figures(1.0)], False, "differ"),
        (figures(0.89), [figures(1.0)], False, "differ"),
        (figures(1.11), [figures(1.0)], True, "not judged"),
        (figures(1.09), [figures(1.0)], True, "agree"),
        (figures(1.25), [figures(1.0), figures(1.2), figures(1.3)], False, "agree"),
        (figures(None), [figures(1.0)], False, "differ"),
        (figures(1.0, hit_rate=0.0), [figures(1.0, hit_rate=0.0)], False, "agree"),
        (figures(1.0, hit_rate=0.01), [figures(1.0, hit_rate=0.0)], False, "differ"),
    ],
)
def test_a_fleet_is_held_against_the_median_of_its_twins_unless_the_machine_was_disturbed(
    live: Figures, simulated: list[Figures], disturbed: bool, expected: Verdict
) -> None:
    assert verdict(numbers(live, simulated, TOLERANCE), disturbed=disturbed) == expected


@pytest.mark.parametrize(
    ("cost", "disturbed"),
    [
        ({"waited_s": 0.02, "late_p90_s": 0.02, "stood_still_s": 0.1}, False),
        ({"waited_s": 0.2}, True),
        ({"late_p90_s": 0.2}, True),
        ({"stood_still_s": 0.3}, True),
    ],
)
def test_a_machine_is_disturbed_by_waiting_for_cores_by_requests_sent_late_and_by_standing_still(
    cost: dict[str, float], disturbed: bool
) -> None:
    nothing = {"waited_s": 0.0, "late_p90_s": 0.0, "stood_still_s": 0.0}
    assert Machine(**(nothing | cost), warned={}).disturbed(1.0) == disturbed


async def test_a_heart_misses_beats_while_nothing_runs() -> None:
    async with Heartbeat().listened() as heartbeat:
        await asyncio.sleep(0.05)
        time.sleep(0.2)  # noqa: ASYNC251 - so that nothing runs
        await asyncio.sleep(0.05)
    assert heartbeat.longest_pause > 0.15


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [(["agree", "agree"], 0), (["agree", "not judged"], 3), (["not judged", "differ"], 1), ([], 1)],
)
def test_one_run_that_differs_is_a_failure_whatever_the_others_say(verdicts: list[Verdict], expected: int) -> None:
    assert exit_code([agreement(one) for one in verdicts]) == expected


def agreement(found: Verdict) -> Agreement:
    return Agreement(
        policy="dualmap",
        ordering="fcfs",
        admission="none",
        qps=1.0,
        engines=2,
        speed=2.0,
        requests=9,
        verdict=found,
        waited_s=0.0,
        late_p90_s=0.0,
        stood_still_s=0.0,
        warned={},
        wall_s=9.0,
        numbers=[],
    )
