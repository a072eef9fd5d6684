"""A hotspot: two long prefixes that arrive in bursts, over prompts that share nothing. Hard for consistent hashing: a
burst overloads the prefix's one home. The lengths are those of the two hot tools of the tool-and-agent trace."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from pointsman.primitives import EngineSeconds, Tenant, Tokens, plain_sum
from pointsman.simulation.workload.generators.base import exponential_length, interleaved
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest

COLD = Tenant("cold")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotShape:
    prefix_blocks: tuple[int, ...] = (12, 5)
    shares: tuple[float, ...] = (0.4, 0.2)
    """One share of all requests per hot prefix; the rest is cold. Together at most 1."""
    burst_requests: int = 20
    burst_s: EngineSeconds = 2.0
    """Requests of a burst come at random within this."""
    question_tokens: float = 300.0
    cold_tokens: float = 3000.0
    answer_tokens: float = 120.0
    input_tokens_max: Tokens = 16_384
    output_tokens_max: Tokens = 1024

    def __post_init__(self) -> None:
        """Raises ValueError unless shares fit the prefixes and sum to at most 1."""
        fits = len(self.prefix_blocks) == len(self.shares) and all(share >= 0 for share in self.shares)
        if not fits or plain_sum(self.shares) > 1 or self.burst_requests < 1:
            raise ValueError(f"each hot prefix needs a share, all together at most 1, and bursts a request, not {self}")


def two_hot_prefixes(
    count: int, *, rate: float, chance: random.Random, shape: HotspotShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or HotspotShape()
    ids = BlockIds()
    prefixes = [ids.take(blocks) for blocks in shape.prefix_blocks]
    begins = [*(share / shape.burst_requests for share in shape.shares), 1 - plain_sum(shape.shares)]
    weights = list(accumulate(begins))

    def burst_or_cold(_number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        chosen = chance.choices(range(len(begins)), cum_weights=weights)[0]
        if chosen == len(prefixes):
            yield _request((), start, COLD, shape.cold_tokens, ids, shape, chance)
            return
        for _ in range(shape.burst_requests):
            arrival_s = start + chance.uniform(0.0, shape.burst_s)
            tenant = Tenant(f"hot-{chosen + 1}")
            yield _request(prefixes[chosen], arrival_s, tenant, shape.question_tokens, ids, shape, chance)

    return interleaved(count, tasks_rate=rate * weights[-1], task=burst_or_cold, chance=chance)


def _request(
    prefix: tuple[int, ...],
    arrival_s: EngineSeconds,
    tenant: Tenant,
    question_tokens: float,
    ids: BlockIds,
    shape: HotspotShape,
    chance: random.Random,
) -> WorkloadRequest:
    return ids.request(
        prefix,
        exponential_length(question_tokens, chance),
        output_tokens=min(exponential_length(shape.answer_tokens, chance), shape.output_tokens_max),
        tenant=tenant,
        arrival_s=arrival_s,
        input_tokens_max=shape.input_tokens_max,
    )
