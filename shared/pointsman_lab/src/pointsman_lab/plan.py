"""`pointsman-lab plan`: the cost of planning and applying migrations in the worst round: many requests of hot prefixes
wait on a few instances while the others are idle. Planning changes nothing, so all rounds share a State; applying is
timed on a copy each."""

import pickle
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from pointsman.bounds import Bounds
from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksStored, Run
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set, rebalancing_policy
from pointsman.policies.rebalancing import REBALANCING_POLICIES, MigrationPlan
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Tenant, Term
from pointsman.runtime.number_types import Whole
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.prefix_index import ROOT
from pointsman.state.state import PoolSettings, State
from pointsman_cli.options import CONTEXT, COUNT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table

BLOCK_TOKENS = 64
HOT_PREFIXES = 8
PREFIX_BLOCKS = 96
OVERLOADED = 4
ROUNDS = 50
CARRIED_OUT = 10
SEED = 1
QUESTION_BLOCKS = 4
SLO_SECONDS = 5.0
NOW = 0.5


@click.command("plan", context_settings=CONTEXT)
@click.option("--queued", type=COUNT, default=1000, show_default=True, help="Requests that wait.")
@click.option("--instances", type=Whole(Bounds(OVERLOADED + 1)), default=16, show_default=True, help="Of the pool.")
@out_option
def plan_command(queued: int, instances: int, out: Path | None) -> None:
    """Time one round of rebalancing: planning it, and carrying it out. The requests wait on 4 instances.

    \b
      pointsman-lab plan                                      1,000 queued requests on 4 of 16 instances
      pointsman-lab plan --queued 5000 --instances 64 --out plan.json
    """
    state = crowded_pool(queued, instances, Random(SEED))
    figures: dict[str, Any] = {"queued": queued, "instances": instances, "overloaded": OVERLOADED, "policies": {}}
    for name in sorted(set(REBALANCING_POLICIES) - {"off"}):
        figures["policies"][name] = _measure(name, state)
    _print(figures)
    if out:
        write_json(out, figures)


def crowded_pool(queued: int, instances: int, rng: Random) -> State:
    state = State(PoolSettings(block_tokens=BLOCK_TOKENS))
    names = [InstanceId(f"engine-{number:03}") for number in range(instances)]
    prefixes = [_keys(PREFIX_BLOCKS, rng) for _ in range(HOT_PREFIXES)]
    for name in names:
        _join(state, name)
    for name in names[:OVERLOADED]:
        for sequence, prefix in enumerate(prefixes, start=1):
            runs = [Run(pack_keys(prefix), ROOT)]
            state.apply(BlocksStored(at=0.0, instance=name, epoch=Epoch(1), sequence=sequence, runs=runs))
    for number in range(queued):
        keys = [*prefixes[number % HOT_PREFIXES], *_keys(QUESTION_BLOCKS, rng)]
        _wait(state, RequestId(f"request-{number}"), keys, names[number % OVERLOADED])
    return state


def _keys(count: int, rng: Random) -> list[BlockKey]:
    return [BlockKey(rng.getrandbits(64)) for _ in range(count)]


def _join(state: State, name: InstanceId) -> None:
    profile = PROFILES[DEFAULT_PROFILE]
    state.apply(
        InstanceJoined(
            at=0.0, instance=name, epoch=Epoch(1), url="", model="", block_tokens=BLOCK_TOKENS, engine_block_tokens=16,
            kv_capacity_tokens=profile.kv_capacity_tokens, max_model_len=0, prefill=profile.prefill_cost,
        )
    )  # fmt: skip


def _wait(state: State, request: RequestId, keys: list[BlockKey], name: InstanceId) -> None:
    tokens = len(keys) * BLOCK_TOKENS
    state.apply(
        RequestArrived(
            at=0.0, request=request, arrived_at=0.0, ingress="", tenant=Tenant("t"), keys=pack_keys(keys),
            prompt_tokens=tokens, max_output_tokens=1, slo_ttft=SLO_SECONDS, slo_tpot=1.0,
        )
    )  # fmt: skip
    uncached = QUESTION_BLOCKS * BLOCK_TOKENS
    work = state.latency.prefill_seconds(state.fleet[name], tokens, tokens - uncached)
    state.apply(
        RequestPlaced(
            at=0.0, request=request, instance=name, hit_blocks=len(keys) - QUESTION_BLOCKS, uncached_tokens=uncached,
            queue_seconds=0.0, prefill_seconds=work, predicted_ttft=work, policy="", settings={}, reason="",
            candidates=[],
        )
    )  # fmt: skip


def _measure(name: str, state: State) -> dict[str, Any]:
    policy = rebalancing_policy(name)
    planning, carrying_out = [], []
    plan = MigrationPlan(0)
    for _ in track(range(ROUNDS), description=name):
        started = time.perf_counter()
        plan = policy.plan(state, NOW)
        planning.append(time.perf_counter() - started)
    policies = policy_set(ordering="fcfs", admission="none")
    for _ in range(CARRIED_OUT):
        copy: State = pickle.loads(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
        dispatcher = Dispatcher(copy, policies, term=Term(1))
        started = time.perf_counter()
        dispatcher.migrate(plan, NOW)
        carrying_out.append(time.perf_counter() - started)
    return {
        "moves": len(plan.migrations),
        "plan_ms": _milliseconds(planning),
        "carry_out_ms": _milliseconds(carrying_out),
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds) * 1e3, 2),
        "least": round(min(seconds) * 1e3, 2),
        "most": round(max(seconds) * 1e3, 2),
    }


def _print(figures: dict[str, Any]) -> None:
    title = f"One round, {figures['queued']:,} queued on {figures['overloaded']} of {figures['instances']} instances"
    title = f"{title}; median (least to most), wall time"
    made = table("policy", ">moves", ">planning", ">carrying out", title=title)
    for name, measured in figures["policies"].items():
        times = [f"{t['median']:.2f} ms ({t['least']:.2f} to {t['most']:.2f})" for t in
                 (measured["plan_ms"], measured["carry_out_ms"])]  # fmt: skip
        made.add_row(name, str(measured["moves"]), *times)
    Console().print(made)
