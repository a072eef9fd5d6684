"""Tool calls: single requests behind long tool descriptions with a Zipf skew, as in the tool-and-agent traces."""

import random
from dataclasses import dataclass

from pointsman.primitives import Tenant, Tokens
from pointsman.simulation.workload.generators.base import length_about, zipf
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsShape:
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
        requests.append(
            ids.request(
                prefixes[tool],
                length_about(shape.question_tokens, chance),
                output_tokens=min(length_about(shape.answer_tokens, chance), shape.output_tokens_max),
                tenant=Tenant(f"tool-{tool + 1}"),
                arrival_s=arrival_s,
                input_tokens_max=shape.input_tokens_max,
            )
        )
        arrival_s += chance.expovariate(rate)
    return requests
