"""GSP: groups of prompts that share a prefix, as in SGLang's serving benchmark (`generated-shared-prefix`). Prefixes
are rounded to whole trace blocks. `random` shuffles the prompts; `round_robin` takes one of each group in turn, the
worst order for a slightly too small LRU cache."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pointsman.primitives import Tenant, Tokens
from pointsman.simulation.workload.arrivals import poisson
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GspShape:
    """Raises ValueError for invalid numbers."""

    groups: int = 64
    prompts_per_group: int = 16
    """Further requests come from new groups."""
    prefix_tokens: Tokens = 2048
    question_tokens: Tokens = 128
    output_tokens: Tokens = 256
    range_ratio: float = 1.0
    """Each length is drawn evenly from this share of itself up to itself."""
    order: Literal["random", "round_robin"] = "random"
    lengths: tuple[Tokens, ...] = ()
    """If given, each group has one of these prompt lengths in turn, and `prefix_share` of it is shared."""
    prefix_share: float = 0.5

    def __post_init__(self) -> None:
        lengths = (self.prefix_tokens, self.question_tokens, self.output_tokens, self.range_ratio)
        if min(self.groups, self.prompts_per_group) < 1 or min(lengths) < 0 or self.range_ratio > 1:
            raise ValueError(
                f"groups and prompts must be at least 1, lengths not negative, range_ratio from 0 to 1: {self}"
            )


def gsp(count: int, *, rate: float, chance: random.Random, shape: GspShape | None = None) -> list[WorkloadRequest]:
    shape = shape or GspShape()
    ids = BlockIds()
    requests: list[WorkloadRequest] = []
    while len(requests) < count:
        requests += _pass(ids, shape, chance)
    return poisson(requests[:count], rate=rate, chance=chance)


def _pass(ids: BlockIds, shape: GspShape, chance: random.Random) -> list[WorkloadRequest]:
    groups = [list(_group(number, ids, shape, chance)) for number in range(1, shape.groups + 1)]
    requests = [prompt for turn in zip(*groups, strict=True) for prompt in turn]
    if shape.order == "random":
        chance.shuffle(requests)
    return requests


def _group(number: int, ids: BlockIds, shape: GspShape, chance: random.Random) -> Iterator[WorkloadRequest]:
    length = shape.lengths[number % len(shape.lengths)] if shape.lengths else 0
    prefix_tokens = shape.prefix_share * length if length else _drawn(shape.prefix_tokens, shape, chance)
    prefix = ids.take(round(prefix_tokens / TRACE_BLOCK_TOKENS))
    for _ in range(shape.prompts_per_group):
        question = length - len(prefix) * TRACE_BLOCK_TOKENS if length else _drawn(shape.question_tokens, shape, chance)
        yield ids.request(
            prefix,
            max(1, question),
            output_tokens=max(1, _drawn(shape.output_tokens, shape, chance)),
            tenant=Tenant(f"group-{number}"),
        )


def _drawn(longest: Tokens, shape: GspShape, chance: random.Random) -> Tokens:
    return chance.randint(round(shape.range_ratio * longest), longest)
