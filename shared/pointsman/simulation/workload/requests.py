"""Requests of a workload, and the ids of their shared blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pointsman.contracts.requests import OUTPUT_UNBOUNDED
from pointsman.contracts.tenants import Priority
from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens

TRACE_BLOCK_TOKENS: Tokens = 512
SLO_TPOT: EngineSeconds = 0.1

NO_TENANT = Tenant("")
NO_SESSION = SessionId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    arrival_s: EngineSeconds
    block_ids: tuple[int, ...]
    input_length: Tokens
    output_tokens: Tokens
    """What the engine generates. The scheduler learns it when the answer ends."""
    tenant: Tenant = NO_TENANT
    session: SessionId = NO_SESSION
    slo_ttft_s: EngineSeconds | None = None
    """None: that of the whole run."""
    slo_tpot_s: EngineSeconds = SLO_TPOT
    priority: Priority = "standard"
    max_output_tokens: Tokens = OUTPUT_UNBOUNDED
    """What the client asks for at most, which the scheduler knows."""


def in_order(requests: Iterable[WorkloadRequest]) -> list[WorkloadRequest]:
    """Sorted by arrival, the first one at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start = ordered[0].arrival_s if ordered else 0.0
    return [replace(request, arrival_s=request.arrival_s - start) for request in ordered]


def mean_rate(requests: Sequence[WorkloadRequest]) -> float:
    span = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return (len(requests) - 1) / span if span > 0 else 0.0


def input_capped(requests: Iterable[WorkloadRequest], input_tokens_max: Tokens | None) -> list[WorkloadRequest]:
    return [
        request
        if input_tokens_max is None or request.input_length <= input_tokens_max
        else replace(
            request, input_length=input_tokens_max, block_ids=request.block_ids[: blocks_for(input_tokens_max)]
        )
        for request in requests
    ]


def blocks_for(tokens: Tokens) -> int:
    return -(-tokens // TRACE_BLOCK_TOKENS)


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


class BlockIds:
    """Unused ids. Prompts must diverge at the end of a whole block: a partial block has one continuation only."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))

    def request(
        self,
        prefix: tuple[int, ...],
        tokens_behind: Tokens,
        *,
        output_tokens: Tokens,
        tenant: Tenant,
        arrival_s: EngineSeconds = 0.0,
        session: SessionId = NO_SESSION,
        input_tokens_max: Tokens | None = None,
    ) -> WorkloadRequest:
        length = len(prefix) * TRACE_BLOCK_TOKENS + tokens_behind
        length = length if input_tokens_max is None else min(length, input_tokens_max)
        return WorkloadRequest(
            arrival_s=arrival_s,
            block_ids=self.extended(prefix, length),
            input_length=length,
            output_tokens=output_tokens,
            tenant=tenant,
            session=session,
        )

    def extended(self, block_ids: tuple[int, ...], length: Tokens) -> tuple[int, ...]:
        """`block_ids` and new ones for a prompt of `length` tokens."""
        return block_ids + self.take(blocks_for(length) - len(block_ids))


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
