"""GSP, generated shared prefixes: groups of prompts that have a prefix in common and nothing else.

The shape and the numbers are those of SGLang's serving benchmark (`generated-shared-prefix`): 64 groups of 16
prompts, 2,048 shared tokens, a question of 128, an answer of 256; `range_ratio` mixes the lengths as its option of
that name does. Prefixes are rounded to whole trace blocks.

`random` shuffles the prompts. `round_robin` takes one prompt of each group in turn: between two uses of a prefix come
all others, the worst order for a cache that forgets what was least recently used and is a little too small.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pointsman.primitives import Tenant, Tokens
from pointsman.simulation.workload.arrivals import poisson
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GspShape:
    """Groups, prompts and lengths. Raises ValueError for numbers that make no sense."""

    groups: int = 64
    prompts_per_group: int = 16
    """Whoever wants more than `groups * prompts_per_group` requests gets further groups, with new prefixes."""
    prefix_tokens: Tokens = 2048
    question_tokens: Tokens = 128
    output_tokens: Tokens = 256
    shared_ratio: float | None = None
    """Share of a prompt that is prefix: splits `prefix_tokens + question_tokens` anew. None: as they are."""
    range_ratio: float = 1.0
    """Each length is drawn evenly from this share of itself up to itself; 1 leaves all equal."""
    order: Literal["random", "round_robin"] = "random"

    def __post_init__(self) -> None:
        shares = (self.range_ratio, 0.0 if self.shared_ratio is None else self.shared_ratio)
        lengths = (self.prefix_tokens, self.question_tokens, self.output_tokens)
        if min(self.groups, self.prompts_per_group) < 1 or min(*lengths, *shares) < 0 or max(shares) > 1:
            msg = f"groups and prompts must be at least 1, lengths not negative, ratios from 0 to 1: {self}"
            raise ValueError(msg)

    def split(self) -> tuple[Tokens, Tokens]:
        """Longest prefix and longest question."""
        if self.shared_ratio is None:
            return self.prefix_tokens, self.question_tokens
        total = self.prefix_tokens + self.question_tokens
        prefix = round(self.shared_ratio * total)
        return prefix, total - prefix


def gsp(count: int, *, rate: float, chance: random.Random, shape: GspShape | None = None) -> list[WorkloadRequest]:
    """`count` requests, `rate` a second (Poisson); a group is a tenant."""
    shape = shape or GspShape()
    ids = BlockIds()
    requests: list[WorkloadRequest] = []
    while len(requests) < count:
        requests += _pass(ids, shape, chance)
    return poisson(requests[:count], rate=rate, chance=chance)


def _pass(ids: BlockIds, shape: GspShape, chance: random.Random) -> list[WorkloadRequest]:
    """Every prompt of a new set of groups once, in the order of `shape`."""
    groups = [list(_group(number, ids, shape, chance)) for number in range(1, shape.groups + 1)]
    requests = [prompt for turn in zip(*groups, strict=True) for prompt in turn]
    if shape.order == "random":
        chance.shuffle(requests)
    return requests


def _group(number: int, ids: BlockIds, shape: GspShape, chance: random.Random) -> Iterator[WorkloadRequest]:
    prefix_max, question_max = shape.split()
    prefix = ids.take(round(_drawn(prefix_max, shape, chance) / TRACE_BLOCK_TOKENS))
    for _ in range(shape.prompts_per_group):
        length = len(prefix) * TRACE_BLOCK_TOKENS + max(1, _drawn(question_max, shape, chance))
        yield WorkloadRequest(
            arrival_s=0.0,
            block_ids=ids.extended(prefix, length),
            input_length=length,
            output_tokens=max(1, _drawn(shape.output_tokens, shape, chance)),
            tenant=Tenant(f"group-{number}"),
        )


def _drawn(longest: Tokens, shape: GspShape, chance: random.Random) -> Tokens:
    return chance.randint(round(shape.range_ratio * longest), longest)
