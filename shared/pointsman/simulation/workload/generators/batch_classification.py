"""Batch jobs that classify items: all items of a job share a few-shot prompt, are short, get an answer of a few tokens,
and arrive within seconds. Jobs of the same kind come again with the same prompt; sometimes its last examples change."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, Tenant, Tokens
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    jobs: int = 60
    """Kinds of jobs; the n-th has weight 1/n."""
    few_shot_blocks_min: int = 2
    few_shot_blocks_max: int = 9
    changed_share: float = 0.15
    """Runs with another last block of examples."""
    items_min: int = 8
    items_max: int = 40
    items_per_s: float = 15.0
    item_tokens: float = 220.0
    item_tokens_max: Tokens = 4096
    label_tokens_max: Tokens = 6
    """Evenly from 1."""
    tenants: int = 6


def batch_classification(
    count: int, *, rate: float, chance: random.Random, shape: BatchShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or BatchShape()
    ids = BlockIds()
    prompts = [
        ids.take(chance.randint(shape.few_shot_blocks_min, shape.few_shot_blocks_max)) for _ in range(shape.jobs)
    ]
    popularity = zipf(shape.jobs, 1.0)

    def run(_number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        job = chance.choices(range(shape.jobs), cum_weights=popularity)[0]
        if chance.uniform(0.0, 1.0) < shape.changed_share:
            prompts[job] = prompts[job][:-1] + ids.take(1)
        arrival_s = start
        for _ in range(chance.randint(shape.items_min, shape.items_max)):
            yield ids.request(
                prompts[job],
                min(exponential_length(shape.item_tokens, chance), shape.item_tokens_max),
                output_tokens=chance.randint(1, shape.label_tokens_max),
                tenant=Tenant(f"team-{job % shape.tenants + 1}"),
                arrival_s=arrival_s,
            )
            arrival_s += chance.expovariate(shape.items_per_s)

    items_mean = (shape.items_min + shape.items_max) / 2
    return interleaved(count, tasks_rate=rate / items_mean, task=run, chance=chance)
