"""Tool calls: single requests behind long tool descriptions with a Zipf skew, as in the tool-and-agent traces."""

import random

from pointsman.primitives import Tenant
from pointsman.simulation.workload.generators.base import exponential_length, zipf
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest

TOOLS = 40
ZIPF_EXPONENT = 1.2
PREFIX_BLOCKS = (3, 14)
QUESTION_TOKENS, ANSWER_TOKENS = 900.0, 120.0
"""Means (exponential)."""
INPUT_TOKENS_MAX, OUTPUT_TOKENS_MAX = 16_384, 1024


def tools(count: int, *, rate: float, chance: random.Random) -> list[WorkloadRequest]:
    """`count` requests, `rate` a second at random moments, each behind one of the tools' prefixes."""
    ids = BlockIds()
    prefixes = [ids.take(chance.randint(*PREFIX_BLOCKS)) for _ in range(TOOLS)]
    popularity = zipf(TOOLS, ZIPF_EXPONENT)
    requests = []
    arrival_s = 0.0
    for _ in range(count):
        tool = chance.choices(range(TOOLS), cum_weights=popularity)[0]
        requests.append(
            ids.request(
                prefixes[tool],
                exponential_length(QUESTION_TOKENS, chance),
                output_tokens=min(exponential_length(ANSWER_TOKENS, chance), OUTPUT_TOKENS_MAX),
                tenant=Tenant(f"tool-{tool + 1}"),
                arrival_s=arrival_s,
                input_tokens_max=INPUT_TOKENS_MAX,
            )
        )
        arrival_s += chance.expovariate(rate)
    return requests
