"""Workloads: lists of requests in order of arrival, with block ids that say which prefixes they share. Read from a
trace (`traces`) or generated (`generators`), re-timed (`arrivals`), turned into tokens (`tokens`). An id stands for 512
tokens *and everything before them*, as in Mooncake's traces; a partial last block may be continued by a longer prompt
with the same id."""

from pointsman.simulation.workload.arrivals import ARRIVALS, at_rate
from pointsman.simulation.workload.generators import GENERATORS, HELD_OUT
from pointsman.simulation.workload.generators.clients import LONGER_PREFIXES, MORE_REQUESTS
from pointsman.simulation.workload.requests import (
    TRACE_BLOCK_TOKENS,
    WorkloadRequest,
    infinite_cache_hit_share,
    input_capped,
    mean_rate,
)
from pointsman.simulation.workload.tokens import FIRST_TOKEN_ID, prompt_token_ids
from pointsman.simulation.workload.traces import TraceError, read_trace

__all__ = [
    "ARRIVALS",
    "FIRST_TOKEN_ID",
    "GENERATORS",
    "HELD_OUT",
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
