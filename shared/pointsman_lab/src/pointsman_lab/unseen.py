"""`pointsman-lab unseen`: `pointsman` and others on workloads that nobody has looked at, since a seed draws them: a
generator, each number of its shape times e ** N(0, SPREAD), the instances, and a rate near what a central queue serves. The
best of the others is chosen afterwards, which favours them. Limit: the structure of the generators is known."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.console import Console

from pointsman.simulation.metrics import effective_capacity
from pointsman.simulation.scenario import Scenario
from pointsman.simulation.simulator import simulate
from pointsman.simulation.workload import ARRIVALS, WorkloadRequest, input_capped
from pointsman.simulation.workload.generators.agent_loops import AgentShape, agent_loops
from pointsman.simulation.workload.generators.batch_classification import BatchShape, batch_classification
from pointsman.simulation.workload.generators.chat import ChatShape, chat
from pointsman.simulation.workload.generators.code_completion import CompletionShape, code_completion
from pointsman.simulation.workload.generators.generated_shared_prefix import GspShape, gsp
from pointsman.simulation.workload.generators.llm_as_judge import JudgeShape, llm_as_judge
from pointsman.simulation.workload.generators.long_document_qa import LongDocumentShape, long_document_qa
from pointsman.simulation.workload.generators.mixed_day import MixedShape, mixed_day
from pointsman.simulation.workload.generators.rag import RagShape, rag
from pointsman.simulation.workload.generators.tree_of_thoughts import TreeShape, tree_of_thoughts
from pointsman_cli.options import CONTEXT, COUNT, WHOLE, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.progress_bar import progress_bar
from pointsman_cli.simulate.experiment import run_all
from pointsman_cli.terminal import output_console, progress_console, say, table
from pointsman_lab.results.central_queue import central_queue
from pointsman_lab.results.studies.rows import AS_LIVE, DOCUMENT_CAP, LIVE_DEFAULT, rows, tuned
from pointsman_lab.results.study import OURS, WARMUP, Row
from pointsman_lab.results.verdict import NEAR_POINTS

SHAPES: dict[Any, Any] = {
    agent_loops: AgentShape(), batch_classification: BatchShape(), chat: ChatShape(), code_completion: CompletionShape(),
    gsp: GspShape(), llm_as_judge: JudgeShape(), long_document_qa: LongDocumentShape(), mixed_day: MixedShape(),
    rag: RagShape(), tree_of_thoughts: TreeShape(),
}  # fmt: skip
"""Generator to the shape that is varied."""
SPREAD = 0.5
KEPT = ("_tokens_max", "_per_token", "prefix_share", "range_ratio", "branching", "depth")
"""Endings of the names of what no user of a workload chooses, is a share of something else, or multiplies."""
SHARE_MAX = 0.9
INSTANCES = (4, 8, 8, 16)
LOADS = (0.9, 1.0, 1.1)
"""Rate over that at which the central queue has ON_TIME of the requests on time."""
ON_TIME = 0.95
REQUESTS_MIN = 3000
SECONDS_MIN = 25.0
"""Five times the objective: a shorter run would judge the filling of queues alone."""
RATE_MAX = 320.0
"""Faster ones are drawn again."""
ADMISSIONS = (LIVE_DEFAULT, ("fcfs", "none"))
POLICIES = (OURS, "approximate_token_load", "min_ttft", "preble")
TUNED_TOO = ("d2lpm", "preble", "sticky_least_loaded")
"""With POLICIES, those that are the best other somewhere in docs/results.md."""


@dataclass(frozen=True, slots=True)
class Workload:
    seed: int
    generator: Any
    shape: Any
    instances: int
    rate: float

    def requests(self) -> list[WorkloadRequest]:
        count = max(REQUESTS_MIN, int(SECONDS_MIN * self.rate))
        return _requests(self.generator, self.shape, self.rate, self.seed, count)


@dataclass(frozen=True, slots=True)
class Compared:
    """`capacities`: by admission policy and row."""

    workload: Workload
    capacities: dict[str, dict[str, float]]


@click.command("unseen", context_settings=CONTEXT)
@click.option("--first", type=WHOLE, default=0, show_default=True, help="First seed.")
@click.option("--workloads", type=COUNT, default=12, show_default=True)
@click.option("--jobs", type=COUNT, default=2, show_default=True, help="Processes.")
@out_option
def unseen_command(first: int, workloads: int, jobs: int, out: Path | None) -> None:
    """Compare policies on workloads that a seed draws: any generator, any numbers, near saturation.

    \b
      pointsman-lab unseen                              twelve workloads; about five minutes on two cores
      pointsman-lab unseen --first 5000 --workloads 40 --out unseen.json
    """
    console, found = output_console(), list[Compared]()
    with progress_bar(progress_console(), workloads, "workloads") as update:
        for compared in run_all(compare, range(first, first + workloads), jobs):
            found.append(compared)
            update(len(found), "")
    found.sort(key=lambda compared: compared.workload.seed)
    for _, admission in ADMISSIONS:
        _show(console, admission, found)
    if out:
        write_json(out, {"workloads": [_as_json(compared) for compared in found]})


def compare(seed: int) -> Compared:
    workload = drawn(seed)
    requests = workload.requests()
    capacities: dict[str, dict[str, float]] = {}
    for ordering, admission in ADMISSIONS:
        capacities[admission] = {
            row.variant.called: effective_capacity(simulate(_scenario(row, workload), requests).rows[WARMUP:]) or 0.0
            for row in [
                *rows(POLICIES, ordering, admission),
                *(tuned(policy, ordering, admission) for policy in TUNED_TOO),
            ]
        }
    return Compared(workload, capacities)


def _scenario(row: Row, workload: Workload) -> Scenario:
    conditions = {**AS_LIVE, **row.conditions}
    return row.variant.applied_to(Scenario(instances=workload.instances, seed=workload.seed, **conditions))


def drawn(seed: int) -> Workload:
    """Equal seeds give equal workloads."""
    chance = random.Random(f"unseen {seed}")
    while True:
        generator = chance.choice(list(SHAPES))
        shape, instances, load = varied(SHAPES[generator], chance), chance.choice(INSTANCES), chance.choice(LOADS)
        rate = load * _saturating_rate(generator, shape, instances, seed)
        if rate <= RATE_MAX:
            return Workload(seed, generator, shape, instances, rate)


def varied(shape: Any, chance: random.Random) -> Any:
    """Whole numbers stay whole and at least 1, shares below SHARE_MAX, and no maximum is below its minimum."""
    numbers: dict[str, Any] = {}
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name.endswith(KEPT):
            continue
        if isinstance(value, int | float):
            numbers[field.name] = _times(value, _factor(chance), share="share" in field.name)
        elif isinstance(value, tuple) and value and isinstance(value[0], int):
            numbers[field.name] = tuple(_times(number, _factor(chance)) for number in value)
    for least in [name for name in numbers if name.endswith("_min") and f"{name.removesuffix('_min')}_max" in numbers]:
        most = f"{least.removesuffix('_min')}_max"
        numbers[least], numbers[most] = sorted((numbers[least], numbers[most]))
    return replace(shape, **numbers)


def _factor(chance: random.Random) -> float:
    return exp(chance.gauss(0.0, SPREAD))


def _times(value: float, factor: float, *, share: bool = False) -> float:
    if isinstance(value, int):
        return max(1, round(value * factor))
    return min(SHARE_MAX, value * factor) if share else value * factor


def _requests(generator: Any, shape: Any, rate: float, seed: int, count: int) -> list[WorkloadRequest]:
    made = input_capped(generator(count, rate=rate, chance=random.Random(seed), shape=shape), DOCUMENT_CAP)
    return made if generator is mixed_day else ARRIVALS["poisson"](made, rate=rate, chance=random.Random(seed))


def _saturating_rate(generator: Any, shape: Any, instances: int, seed: int) -> float:
    """Within 6%, at most RATE_MAX * 2."""
    served, missed = 0.1 * instances, 0.0
    while not missed or missed / served > 1.06:
        rate = (served * missed) ** 0.5 if missed else 2 * served
        requests = _requests(generator, shape, rate, seed, REQUESTS_MIN)
        outcome = central_queue(Scenario(seed=seed, instances=instances), requests, "fcfs")
        if (effective_capacity(outcome.rows[WARMUP:]) or 0.0) < ON_TIME:
            missed = rate
        elif (served := rate) > RATE_MAX:
            break
    return served


def _show(console: Console, admission: str, found: Sequence[Compared]) -> None:
    title = f"Capacity with admission {admission}"
    shown = table(">seed", "generator", ">instances", ">rate", f">{OURS}", "best other", ">its", ">points", title=title)
    leads = []
    for compared in found:
        workload, capacities = compared.workload, compared.capacities[admission]
        best = _best_other(capacities)
        leads.append(100 * (capacities[OURS] - capacities[best]))
        shown.add_row(
            str(workload.seed),
            workload.generator.__name__,
            str(workload.instances),
            f"{workload.rate:.1f}/s",
            f"{capacities[OURS]:.3f}",
            best,
            f"{capacities[best]:.3f}",
            f"{leads[-1]:+.1f}",
        )
    console.print(shown)
    fixed = {
        name: fmean(compared.capacities[admission][name] for compared in found)
        for name in found[0].capacities[admission]
    }
    second = _best_other(fixed)
    say(
        console,
        f"Best or within a point of the best other at {sum(lead > -NEAR_POINTS for lead in leads)} of {len(leads)}; "
        f"mean {fmean(leads):+.1f}, least {min(leads):+.1f} points. "
        f"Against one other on all, {second}: {100 * (fixed[OURS] - fixed[second]):+.1f} points.",
    )


def _best_other(capacities: dict[str, float]) -> str:
    return max((name for name in capacities if name != OURS), key=capacities.__getitem__)


def _as_json(compared: Compared) -> dict[str, Any]:
    workload = compared.workload
    return {
        "seed": workload.seed,
        "generator": workload.generator.__name__,
        "shape": asdict(workload.shape),
        "instances": workload.instances,
        "rate": round(workload.rate, 2),
        "capacity": compared.capacities,
    }
