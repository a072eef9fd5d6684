"""What a workload is like: how long, how fast, and how much of it a cache could save at best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.primitives import Seconds, Tokens
from pointsman.simulation.workload.requests import NO_SESSION, TRACE_BLOCK_TOKENS, WorkloadRequest, mean_rate


def infinite_cache_hit_share(requests: Sequence[WorkloadRequest], *, warmup: int = 0) -> float:
    """The share of prompt tokens that one cache of infinite size, shared by all, would have: no policy can hit more.

    Exact to the token, and each prompt is there as soon as it arrived. Engines stay below even alone: they cache
    whole blocks only, compute at least one token of each prompt, and take time to compute what is to be hit. The
    first `warmup` requests fill the cache and are not counted. 0 where nothing is counted.
    """
    known: dict[int, Tokens] = {}
    hit = total = 0
    for number, request in enumerate(requests):
        if number >= warmup:
            hit += _known_prefix(request, known)
            total += request.input_length
        for block_id, tokens in zip(request.block_ids, _filled(request.input_length), strict=True):
            known[block_id] = max(tokens, known.get(block_id, 0))
    return hit / total if total else 0.0


def _known_prefix(request: WorkloadRequest, known: dict[int, Tokens]) -> Tokens:
    prefix = 0
    for block_id, tokens in zip(request.block_ids, _filled(request.input_length), strict=True):
        found = min(tokens, known.get(block_id, 0))
        prefix += found
        if found < TRACE_BLOCK_TOKENS:
            break
    return prefix


def _filled(length: Tokens) -> list[Tokens]:
    """How many tokens of a prompt lie in each of its blocks."""
    whole, rest = divmod(length, TRACE_BLOCK_TOKENS)
    return [TRACE_BLOCK_TOKENS] * whole + ([rest] if rest else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens: mean, percentiles (nearest rank) and the longest. All 0 where there is nothing."""

    mean: float
    p50: Tokens
    p90: Tokens
    p99: Tokens
    longest: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """A workload in numbers. Requests without tenant or session count as none of either."""

    requests: int
    tenants: int
    sessions: int
    duration_s: Seconds
    rate: float
    """Mean arrivals a second."""
    input_tokens: Lengths
    output_tokens: Lengths
    blocks: int
    """Different blocks; a partial one counts as one."""
    infinite_cache_hit_share: float


def describe(requests: Sequence[WorkloadRequest]) -> WorkloadFacts:
    """The facts of a workload in arrival order."""
    return WorkloadFacts(
        requests=len(requests),
        tenants=len({request.tenant for request in requests if request.tenant}),
        sessions=len({request.session for request in requests} - {NO_SESSION}),
        duration_s=requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0,
        rate=mean_rate(requests),
        input_tokens=_lengths([request.input_length for request in requests]),
        output_tokens=_lengths([request.output_tokens for request in requests]),
        blocks=len({block_id for request in requests for block_id in request.block_ids}),
        infinite_cache_hit_share=infinite_cache_hit_share(requests),
    )


def _lengths(tokens: list[Tokens]) -> Lengths:
    if not tokens:
        return Lengths(mean=0.0, p50=0, p90=0, p99=0, longest=0)
    ordered = sorted(tokens)

    def rank(share: float) -> Tokens:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Lengths(mean=sum(ordered) / len(ordered), p50=rank(0.5), p90=rank(0.9), p99=rank(0.99), longest=ordered[-1])
