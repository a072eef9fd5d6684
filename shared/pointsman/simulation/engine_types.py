"""Inputs and results of an engine model."""

from collections.abc import Sequence
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, RequestId, Tokens
from pointsman.simulation.block_cache import (
    ANYONE,
    EVICTION_ORDERS,
    BlockHash,
    CacheChange,
    PromptIdentity,
    TokenSource,
)


class RequestTooLongError(ValueError): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Names and defaults as vLLM's. `num_gpu_blocks` 0: as many as the profile's memory holds."""

    block_size: Tokens = 64
    num_gpu_blocks: int = 0
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: int = 256
    eviction: str = "lru"
    seed: int = 0
    host_blocks: int = 0
    host_gb_per_s: float = 20.0
    """Host memory for evicted blocks, as by vLLM's --kv-offloading-size, and how fast they are loaded, 1e9 bytes a
    second."""

    def __post_init__(self) -> None:
        if self.host_blocks < 0 or self.host_gb_per_s <= 0:
            raise ValueError("host_blocks must be at least 0, host_gb_per_s positive")
        if self.block_size < 1 or self.num_gpu_blocks < 0 or self.max_num_seqs < 1:
            raise ValueError("block_size and max_num_seqs must be at least 1, num_gpu_blocks at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs})"
            )
        if self.eviction not in EVICTION_ORDERS:
            raise ValueError(f"no eviction policy {self.eviction!r}; there are {', '.join(EVICTION_ORDERS)}")


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: Sequence[int]
    generated: TokenSource
    identity: PromptIdentity = ANYONE


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """`hashes`: of its leading whole blocks. A block without one is like no other."""

    length: Tokens
    hashes: Sequence[BlockHash]


Prompt = TokenPrompt | HashedPrompt


@dataclass(frozen=True, slots=True)
class Step:
    started_at: EngineSeconds
    seconds: EngineSeconds
    count: int
    prefill_tokens: Tokens
    decoding: int

    @property
    def ends_at(self) -> EngineSeconds:
        return self.started_at + self.seconds


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    request: RequestId
    cached_tokens: Tokens
    loaded_tokens: Tokens = 0
    """Of `cached_tokens`: loaded from the host tier."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens_each` new tokens for each of `decoded`, one for each of `first_tokens`. `changes`: of the cache."""

    ended_at: EngineSeconds
    tokens_each: int
    decoded: list[RequestId]
    first_tokens: list[PrefillEnded]
    finished: list[RequestId]
    changes: list[CacheChange]


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Load, and totals since the start, as in vLLM's metrics."""

    waiting: int
    running: int
    kv_usage: float
    prefix_cache_queries: Tokens
    prefix_cache_hits: Tokens
    prompt_tokens: Tokens
    generation_tokens: Tokens
    preemptions: int
    external_prefix_cache_hits: Tokens = 0
    """Loaded from the host tier."""
