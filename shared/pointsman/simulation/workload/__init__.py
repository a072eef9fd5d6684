"""Workloads: which requests arrive when, with which shared prefixes. A list of requests in the order of arrival.

Read from a trace (`traces`) or made from a seed (`generators`), given other times (`arrivals`), described (`sharing`),
turned into tokens (`tokens`). Ids are chained as in Mooncake's traces: an id stands for 512 tokens *and everything
before them*, so two prompts share a prefix exactly as far as their ids are equal. A last block may be partial; a longer
prompt with the same id continues it. Nothing here sends, waits or reads a clock.
"""

from pointsman.simulation.workload.arrivals import ARRIVALS, at_rate
from pointsman.simulation.workload.generators import GENERATORS
from pointsman.simulation.workload.generators.clients import LONGER_PREFIXES, MORE_REQUESTS
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, WorkloadRequest, input_capped, mean_rate
from pointsman.simulation.workload.sharing import infinite_cache_hit_share
from pointsman.simulation.workload.tokens import FIRST_TOKEN_ID, prompt_token_ids
from pointsman.simulation.workload.traces import TraceError, read_trace

__all__ = [
    "ARRIVALS",
    "FIRST_TOKEN_ID",
    "GENERATORS",
    "LONGER_PREFIXES",
    "MORE_REQUESTS",
    "TRACE_BLOCK_TOKENS",
    "TraceError",
    "WorkloadRequest",
    "at_rate",
    "infinite_cache_hit_share",
    "input_capped",
    "mean_rate",
    "prompt_token_ids",
    "read_trace",
]
