"""Workloads: which requests arrive when, with which shared prefixes.

A workload is a list of requests in order of arrival, whether read from a trace or made by a seeded generator. It is
plain data: the bench sends it over HTTP, the simulator plays it in virtual time, and both see the same prompts,
because the tokens of a block follow from its id and a seed alone.

Ids are chained as in Mooncake's traces: an id stands for 512 tokens *and everything before them*, so two prompts
share a prefix exactly as far as their ids are equal. A last block may be partial; a longer prompt with the same id
continues it.

`traces` reads, `generators` make, `arrivals` gives other times, `sharing` describes, `tokens` fills in the prompts.
Nothing here sends, waits or reads a clock; chance comes in as a `random.Random`.
"""

from pointsman.simulation.workload.arrivals import (
    ARRIVALS,
    Arrivals,
    DayShape,
    at_rate,
    causal,
    diurnal,
    faster,
    gamma,
    poisson,
    timestamps,
    uniform,
)
from pointsman.simulation.workload.generators import (
    GENERATORS,
    LONGER_PREFIXES,
    MORE_REQUESTS,
    WELL_BEHAVED,
    ChatShape,
    Clients,
    Generator,
    GspShape,
    HotspotShape,
    JudgeShape,
    LongDocumentShape,
    ToolsShape,
    TreeShape,
    chat,
    chat_diurnal,
    gsp,
    llm_as_judge,
    long_document_qa,
    tools,
    tree_of_thoughts,
    two_hot_prefixes,
)
from pointsman.simulation.workload.requests import (
    NO_SESSION,
    NO_TENANT,
    TRACE_BLOCK_TOKENS,
    WorkloadRequest,
    in_order,
    input_capped,
    mean_rate,
)
from pointsman.simulation.workload.sharing import Lengths, WorkloadFacts, describe, infinite_cache_hit_share
from pointsman.simulation.workload.tokens import BLOCKS_CACHED_MAX, FIRST_TOKEN_ID, prompt_token_ids
from pointsman.simulation.workload.traces import ROUNDING_SECONDS, TraceError, read_trace

__all__ = [
    "ARRIVALS",
    "BLOCKS_CACHED_MAX",
    "FIRST_TOKEN_ID",
    "GENERATORS",
    "LONGER_PREFIXES",
    "MORE_REQUESTS",
    "NO_SESSION",
    "NO_TENANT",
    "ROUNDING_SECONDS",
    "TRACE_BLOCK_TOKENS",
    "WELL_BEHAVED",
    "Arrivals",
    "ChatShape",
    "Clients",
    "DayShape",
    "Generator",
    "GspShape",
    "HotspotShape",
    "JudgeShape",
    "Lengths",
    "LongDocumentShape",
    "ToolsShape",
    "TraceError",
    "TreeShape",
    "WorkloadFacts",
    "WorkloadRequest",
    "at_rate",
    "causal",
    "chat",
    "chat_diurnal",
    "describe",
    "diurnal",
    "faster",
    "gamma",
    "gsp",
    "in_order",
    "infinite_cache_hit_share",
    "input_capped",
    "llm_as_judge",
    "long_document_qa",
    "mean_rate",
    "poisson",
    "prompt_token_ids",
    "read_trace",
    "timestamps",
    "tools",
    "tree_of_thoughts",
    "two_hot_prefixes",
    "uniform",
]
