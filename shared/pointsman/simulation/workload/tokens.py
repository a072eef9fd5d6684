"""The prompt's tokens: made up from block ids, so that bench, simulator and tests all see the same prompts."""

from array import array
from functools import lru_cache
from hashlib import shake_128

from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, WorkloadRequest

FIRST_TOKEN_ID = 300
"""Smallest id of a made-up prompt: below lie special tokens and single bytes in many vocabularies."""

BLOCKS_CACHED_MAX = 8192
"""How many blocks' tokens are remembered; 2 kB each."""


def prompt_token_ids(request: WorkloadRequest, *, vocab_size: int, seed: int) -> list[int]:
    """The prompt's tokens: equal for equal block ids, `vocab_size` and `seed`, on every machine.

    Ids lie from FIRST_TOKEN_ID up to below `vocab_size`. Raises ValueError when that leaves nothing.
    """
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens.extend(_block_tokens(block_id, vocab_size, seed))
    del tokens[request.input_length :]
    return tokens


@lru_cache(maxsize=BLOCKS_CACHED_MAX)
def _block_tokens(block_id: int, vocab_size: int, seed: int) -> "array[int]":
    span = vocab_size - FIRST_TOKEN_ID
    if span < 1:
        msg = f"a vocabulary of {vocab_size} is too small: prompts use ids from {FIRST_TOKEN_ID} on"
        raise ValueError(msg)
    stream = shake_128(f"{seed}:{block_id}".encode()).digest(4 * TRACE_BLOCK_TOKENS)
    return array(
        "I",
        [
            FIRST_TOKEN_ID + (int.from_bytes(stream[at : at + 4], "little") * span >> 32)
            for at in range(0, len(stream), 4)
        ],
    )
