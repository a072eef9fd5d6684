"""Prompt tokens made from block ids, the same in bench, simulator and tests."""

from array import array
from functools import lru_cache
from hashlib import shake_128

from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, WorkloadRequest

FIRST_TOKEN_ID = 300
"""Lower ids are special tokens and single bytes in many vocabularies."""

BLOCKS_CACHED_MAX = 8192


def prompt_token_ids(request: WorkloadRequest, *, vocab_size: int, seed: int) -> list[int]:
    """Equal for equal block ids, `vocab_size` and `seed`. Ids are from FIRST_TOKEN_ID to below `vocab_size`. Raises
    ValueError if that range is empty."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens.extend(_block_tokens(block_id, vocab_size, seed))
    del tokens[request.input_length :]
    return tokens


@lru_cache(maxsize=BLOCKS_CACHED_MAX)
def _block_tokens(block_id: int, vocab_size: int, seed: int) -> "array[int]":
    span = vocab_size - FIRST_TOKEN_ID
    if span < 1:
        raise ValueError(f"a vocabulary of {vocab_size} is too small: prompts use ids from {FIRST_TOKEN_ID} on")
    stream = shake_128(f"{seed}:{block_id}".encode()).digest(4 * TRACE_BLOCK_TOKENS)
    return array(
        "I",
        [
            FIRST_TOKEN_ID + (int.from_bytes(stream[at : at + 4], "little") * span >> 32)
            for at in range(0, len(stream), 4)
        ],
    )
