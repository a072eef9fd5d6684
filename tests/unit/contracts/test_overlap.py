"""Requests of `cmd.overlap` as strangers may write them: what is out of bounds is refused where messages are read."""

import base64
import json
from typing import Any

import pytest

from pointsman.contracts.codec import UndecodableError, decode_command
from pointsman.contracts.overlap import (
    OVERLAP_BYTES_MAX,
    OVERLAP_KEYS_MAX,
    OVERLAP_PROMPTS_MAX,
    OVERLAP_TOKENS_MAX,
    OverlapRequest,
)


def payload(*prompts: Any, **fields: Any) -> bytes:
    return json.dumps({"type": "OverlapRequest", "prompts": prompts, **fields}).encode()


def keys(count: int) -> str:
    return base64.b64encode(bytes(8 * count)).decode()


HALF = OVERLAP_TOKENS_MAX // 2
WRONG = {
    "no prompts": payload(),
    "too many prompts": payload(*[{}] * (OVERLAP_PROMPTS_MAX + 1)),
    "a negative id": payload({"token_ids": [1, -1]}),
    "an id beyond 32 bits": payload({"token_ids": [2**32]}),
    "an id beyond 64 bits": payload({"token_ids": [2**70]}),
    "a fraction": payload({"token_ids": [1.5]}),
    "a truth value": payload({"token_ids": [True]}),
    "text": payload({"token_ids": "1 2 3"}),
    "keys that are no base64": payload({"block_keys": "%%%"}),
    "half a key": payload({"block_keys": base64.b64encode(bytes(12)).decode()}),
    "keys as numbers": payload({"block_keys": [1, 2]}),
    "ids and keys": payload({"token_ids": [1], "block_keys": keys(1)}),
    "a field that there is not": payload({"tokens": [1]}),
    "another": payload({"token_ids": [1]}, model="m"),
    "too many ids in one prompt": payload({"token_ids": [1] * (OVERLAP_TOKENS_MAX + 1)}),
    "too many ids in two": payload({"token_ids": [1] * HALF}, {"token_ids": [1] * (HALF + 1)}),
    "too many keys": payload({"block_keys": keys(OVERLAP_KEYS_MAX)}, {"block_keys": keys(1)}),
    "a long salt": payload({"token_ids": [1]}, cache_salt="x" * 1025),
    "a long tenant": payload({"token_ids": [1]}, tenant="x" * 257),
    "a list of lists": payload([[1]]),
    "deep nesting": b'{"type":"OverlapRequest","prompts":' + b"[" * 600 + b"]" * 600 + b"}",
    "no JSON": b"{",
    "no text": b'{"type":"OverlapRequest","prompts":[{}],"cache_salt":"\xff"}',
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_out_of_bounds_is_refused(name: str) -> None:
    with pytest.raises(UndecodableError):
        decode_command(WRONG[name])


@pytest.mark.parametrize(
    "prompts",
    [
        [{}],
        [{"token_ids": []}, {"block_keys": ""}],
        [{"token_ids": [0, 2**32 - 1]}],
        [{"token_ids": [123_456] * OVERLAP_TOKENS_MAX}],
        [{"block_keys": keys(OVERLAP_KEYS_MAX)}],
        [{"token_ids": [1]}] * OVERLAP_PROMPTS_MAX,
    ],
    ids=["nothing", "nothing twice", "extremes", "most ids", "most keys", "most prompts"],
)
def test_what_is_within_bounds_is_read_and_within_the_bytes_of_a_request(prompts: list[Any]) -> None:
    written = payload(*prompts).replace(b" ", b"")

    assert isinstance(decode_command(written), OverlapRequest)
    assert len(written) <= OVERLAP_BYTES_MAX
