"""Numbers of DualMap's paper that no fleet simulation gives: lengths of hash keys, shared prefixes, overhead."""

from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from pointsman.simulation.scenario import Scenario, block_keys
from pointsman.simulation.simulator import simulate
from pointsman.simulation.workload import TRACE_BLOCK_TOKENS, WorkloadRequest, at_rate
from pointsman.state.hotness import Hotness
from pointsman_cli.simulate.experiment import Source, requests_of
from pointsman_lab.results.studies.rows import PAPER_CONDITIONS, Workloads, short
from pointsman_lab.results.study import WARMUP

INSTANCES = 8
SEED = 0
BINS = (("1", 1, 1), ("2", 2, 2), ("5 to 6", 5, 6), ("12 to 13", 12, 13))
"""Lengths with a peak in the paper's figure."""
THRESHOLDS = {"2 per n": (2.0, 1.0), "1 per n": (1.0, 0.5)}
"""Hot and cold shares, in units of 1/n: the paper's text, and what its Figure 6b shows."""


def key_lengths(traces: Path) -> Mapping[str, float]:
    """Figure 6: share of requests by the blocks of their hash key, after the warm-up."""
    found = {}
    for source, (called, (hot, cold)) in product(_traces(traces), THRESHOLDS.items()):
        lengths = _lengths(source, hot, cold)
        for name, low, high in BINS:
            share = sum(count for length, count in lengths.items() if low <= length <= high) / lengths.total()
            found[f"{short(source)}, {called}, {name} blocks"] = share
    return found


def _lengths(source: Source, hot: float, cold: float) -> Counter[int]:
    hotness = Hotness(block_tokens=TRACE_BLOCK_TOKENS, level_tokens=TRACE_BLOCK_TOKENS, hot_share=hot, cold_share=cold)
    lengths: Counter[int] = Counter()
    for number, request in enumerate(requests_of(source, SEED)):
        keys = block_keys(request, TRACE_BLOCK_TOKENS)
        key = hotness.affinity_key(keys)
        if number >= WARMUP and key is not None:
            lengths[keys.index(key) + 1] += 1
        hotness.arrived(keys, INSTANCES)
    return lengths


def shared_prefixes(traces: Path) -> Mapping[str, float]:
    """Figure 14: share of requests whose prompt shares at most that share of its tokens with an earlier one."""
    found = {}
    for source in _traces(traces):
        shares = _shared(requests_of(source, SEED))
        for limit in (0.0, 0.25, 0.5, 0.75, 0.95):
            found[f"{short(source)}, at most {limit:.0%}"] = sum(share <= limit for share in shares) / len(shares)
    return found


def _shared(requests: tuple[WorkloadRequest, ...]) -> list[float]:
    known: set[int] = set()
    shares = []
    for request in requests:
        depth = next((at for at, one in enumerate(request.block_ids) if one not in known), len(request.block_ids))
        shares.append(min(1.0, depth * TRACE_BLOCK_TOKENS / request.input_length))
        known.update(request.block_ids)
    return shares[WARMUP:]


def scheduler_overhead(traces: Path) -> Mapping[str, float]:
    """Figure 13b: mean microseconds of a decision, and the P50 of TTFT, by instances. Real time of this machine."""
    found = {}
    source = Workloads(traces).conversation(1500)
    for instances in (8, 16, 32):
        timed = at_rate(requests_of(source, SEED), rate=0.7 * instances)
        outcome = simulate(Scenario(instances=instances, routing="dualmap", **PAPER_CONDITIONS), timed)
        waits = sorted(row.ttft for row in outcome.rows if row.ttft is not None)
        found[f"{instances} instances, us"] = outcome.decision_seconds / outcome.decisions * 1e6
        found[f"{instances} instances, TTFT P50 ms"] = 1000 * waits[len(waits) // 2]
    return found


def _traces(traces: Path) -> tuple[Source, Source]:
    return Workloads(traces).conversation(), Workloads(traces).tools()
