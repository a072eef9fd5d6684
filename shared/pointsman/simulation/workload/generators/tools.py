"""Tool calls: single requests behind long tool descriptions, a few of which are much hotter than the rest.

The skew is Zipf's, as in the tool-and-agent traces, where a handful of prefixes carry most of the traffic.
"""

import random
from dataclasses import dataclass

from pointsman.primitives import Tenant, Tokens
from pointsman.simulation.workload.generators.base import length_about, zipf
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsShape:
    """Single requests behind long tool descriptions, a few of which are much hotter than the rest."""

    tools: int = 40
    zipf_exponent: float = 1.2
    prefix_blocks_min: int = 3
    prefix_blocks_max: int = 14
    question_tokens: float = 900.0
    answer_tokens: float = 120.0
    input_tokens_max: Tokens = 16_384
    output_tokens_max: Tokens = 1024


def tools(count: int, *, rate: float, chance: random.Random, shape: ToolsShape | None = None) -> list[WorkloadRequest]:
    """`count` requests, `rate` a second at random moments, each behind one of the tools' prefixes."""
    shape = shape or ToolsShape()
    ids = BlockIds()
    prefixes = [ids.take(chance.randint(shape.prefix_blocks_min, shape.prefix_blocks_max)) for _ in range(shape.tools)]
    popularity = zipf(shape.tools, shape.zipf_exponent)
    requests = []
    arrival_s = 0.0
    for _ in range(count):
        tool = chance.choices(range(shape.tools), cum_weights=popularity)[0]
        length = len(prefixes[tool]) * TRACE_BLOCK_TOKENS + length_about(shape.question_tokens, chance)
        length = min(length, shape.input_tokens_max)
        requests.append(
            WorkloadRequest(
                arrival_s=arrival_s,
                block_ids=ids.extended(prefixes[tool], length),
                input_length=length,
                output_tokens=min(length_about(shape.answer_tokens, chance), shape.output_tokens_max),
                tenant=Tenant(f"tool-{tool + 1}"),
            )
        )
        arrival_s += chance.expovariate(rate)
    return requests
