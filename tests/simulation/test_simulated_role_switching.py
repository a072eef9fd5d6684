"""Roles of a simulated split pool follow a load that turns, and stay where it does not."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

FIXED = Scenario(instances=4, routing="min_ttft", prefill_only=False, split=(2, 2))
SWITCHED = replace(FIXED, role_switching=True)
TURN = 60.0


def turning() -> Sequence[WorkloadRequest]:
    """Until TURN 3 of 4 instances' work of prefill, then 3 of 4 of decoding. No prefix is shared."""
    chance, found, at, block = random.Random(1), list[WorkloadRequest](), 0.0, 0
    while at < 2 * TURN:
        long_prompt = at < TURN
        at += chance.expovariate(2.0 if long_prompt else 14.0)
        tokens, answer = (10_000, 30) if long_prompt else (512, 600)
        blocks = range(block, block + -(-tokens // 512))
        block = blocks.stop
        found.append(WorkloadRequest(arrival_s=at, block_ids=tuple(blocks), input_length=tokens, output_tokens=answer))
    return found


def effective(outcome: Outcome) -> list[float]:
    """Share of each half with both objectives met."""
    halves = [[r for r in outcome.rows if (r.arrived_at < TURN) is first] for first in (True, False)]
    return [sum(row.on_time and row.in_pace for row in half) / len(half) for half in halves]


def test_a_load_that_turns_is_served_where_a_fixed_split_fails_and_nothing_is_lost() -> None:
    requests = turning()
    fixed, switched = simulate(FIXED, requests), simulate(SWITCHED, requests)

    assert Counter(row.end for row in switched.rows) == {"finished": len(requests)}
    assert switched.rows == simulate(SWITCHED, requests).rows
    assert fixed.role_changes == []
    assert min(effective(switched)) > min(effective(fixed)) + 0.1
    assert {role for _, _, role in switched.role_changes} == {"prefill", "decode"}


def test_roles_do_not_flap_under_a_steady_load() -> None:
    for seed in (1, 2):
        steady = GENERATORS["chat"](900, rate=9.0, chance=random.Random(seed))
        changes = simulate(SWITCHED, steady).role_changes

        assert len(changes) <= 2
        assert len({role for _, _, role in changes}) <= 1


def test_gaps_between_tokens_are_those_of_the_engines_steps() -> None:
    cost = PROFILES[DEFAULT_PROFILE].decode_cost
    alone = WorkloadRequest(arrival_s=0.0, block_ids=(1,), input_length=512, output_tokens=100)
    long_prompt = WorkloadRequest(arrival_s=2.0, block_ids=tuple(range(2, 18)), input_length=8192, output_tokens=1)
    one = Scenario(instances=1, routing="min_ttft", prefill_only=False)

    [undisturbed] = simulate(one, [alone]).rows
    disturbed = simulate(one, [alone, long_prompt]).rows[0]

    steps = [cost.step_s + cost.per_context_token_s * tokens for tokens in (512, 612)]
    assert undisturbed.tbt_p90 is not None
    assert disturbed.tbt_p90 is not None
    assert steps[0] < undisturbed.tbt_p90 < steps[1]
    assert steps[0] < disturbed.tbt_p90 < steps[1]  # one long gap of 99 is none of the slowest tenth's shortest
    assert disturbed.ended_at is not None
    assert undisturbed.ended_at is not None
    assert disturbed.ended_at > undisturbed.ended_at + 0.5
