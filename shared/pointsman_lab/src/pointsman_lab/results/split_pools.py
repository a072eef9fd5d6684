"""Split pools under a load that turns: long prompts with short answers, then short prompts with long answers, and again.
Eight instances in fixed splits, unsplit, and with roles that the scaler switches (Mooncake, FAST'25, 5.5)."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import fmean

from pointsman.policies.rebalancing import DEFAULT_REBALANCING
from pointsman.primitives import EngineSeconds
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import Scenario, simulate
from pointsman.simulation.workload import WorkloadRequest
from pointsman_lab.results.study import OURS

INSTANCES = 8
PHASES = 4
PHASE_SECONDS: EngineSeconds = 150.0
RATES = (4.0, 28.0)
"""Requests per second of the two kinds of phases: about six of eight instances' work for one role."""
SPLITS: Mapping[str, tuple[int, int]] = {"no split": (0, 0), "2+6": (2, 6), "4+4": (4, 4), "6+2": (6, 2)}
SWITCHED = "switched"
SEED = 1


def split_pools(traces: Path) -> Mapping[str, float]:
    """Shares with TTFT and TBT within their objectives, by row and phase, and `all`, their mean over phases; role
    `changes`."""
    del traces
    requests = turning_load()
    found: dict[str, float] = {}
    for name, split in {**SPLITS, SWITCHED: SPLITS["4+4"]}.items():
        scenario = Scenario(
            instances=INSTANCES,
            routing=OURS,
            ordering="fair_edf",
            admission="predicted_ttft_fair",
            rebalancing=DEFAULT_REBALANCING,
            split=split,
            prefill_only=False,
            role_switching=name == SWITCHED,
        )
        outcome = simulate(scenario, requests)
        shares = [_effective(outcome, phase * PHASE_SECONDS, (phase + 1) * PHASE_SECONDS) for phase in range(PHASES)]
        found |= {f"{name}, {phase}": share for phase, share in enumerate(shares, 1)}
        found |= {f"{name}, all": fmean(shares), f"{name}, changes": float(len(outcome.role_changes))}
    return found


def turning_load() -> list[WorkloadRequest]:
    chance, requests, blocks = Random(SEED), list[WorkloadRequest](), 0
    for phase in range(PHASES):
        long_prompts = phase % 2 == 0
        at = phase * PHASE_SECONDS
        while (at := at + chance.expovariate(RATES[phase % 2])) < (phase + 1) * PHASE_SECONDS:
            tokens = chance.randint(6000, 14_000) if long_prompts else chance.randint(300, 900)
            answer = chance.randint(20, 80) if long_prompts else chance.randint(400, 800)
            own = range(blocks, blocks + -(-tokens // 512))
            blocks = own.stop
            requests.append(
                WorkloadRequest(arrival_s=at, block_ids=tuple(own), input_length=tokens, output_tokens=answer)
            )
    return requests


def _effective(outcome: Outcome, since: EngineSeconds, until: EngineSeconds) -> float:
    rows = [row for row in outcome.rows if since <= row.arrived_at < until]
    return fmean(row.on_time and row.in_pace for row in rows)
