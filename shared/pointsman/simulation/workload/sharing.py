"""Upper bound of the cache hits of a workload."""

from collections.abc import Sequence

from pointsman.primitives import Tokens
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, WorkloadRequest


def infinite_cache_hit_share(requests: Sequence[WorkloadRequest], *, warmup: int = 0) -> float:
    """Share of prompt tokens that one infinite cache would have, exact to the token. A prompt counts as cached on
    arrival. The first `warmup` requests are not counted."""
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
    whole, rest = divmod(length, TRACE_BLOCK_TOKENS)
    return [TRACE_BLOCK_TOKENS] * whole + ([rest] if rest else [])
