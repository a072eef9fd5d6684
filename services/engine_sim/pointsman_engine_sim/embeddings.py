"""`/v1/embeddings` in vLLM's format. Equal prompts get equal unit vectors, which have no further meaning."""

import base64
import math
import struct
from random import Random
from typing import Any, Literal

import msgspec

from pointsman.primitives import Tokens
from pointsman_engine_sim.answers import Heading, encode
from pointsman_engine_sim.openai_bodies import ApiError, decoded

DIMENSIONS = 64


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    cache_salt: str | None = None


def parse_embeddings(data: bytes) -> EmbeddingsBody:
    """Raises ApiError."""
    body = decoded(data, EmbeddingsBody)
    if not body.input:
        raise ApiError(400, "input must not be empty", param="input")
    return body


def prompts_of(body: EmbeddingsBody) -> list[str | list[int]]:
    """Raises ApiError if texts and ids are mixed."""
    given = body.input
    if isinstance(given, str):
        return [given]
    ids = [part for part in given if isinstance(part, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        raise ApiError(400, "input must not mix texts and token ids", param="input")
    return [part for part in given if not isinstance(part, int)]


def vector(prompt_hash: int, dimensions: int | None) -> list[float]:
    chance = Random(prompt_hash)
    numbers = [chance.gauss(0, 1) for _ in range(dimensions or DIMENSIONS)]
    length = math.sqrt(sum(number * number for number in numbers))
    return [number / length for number in numbers]


def whole_embeddings(
    heading: Heading, vectors: list[list[float]], encoding: Literal["float", "base64"], tokens: Tokens
) -> bytes:
    data: list[dict[str, Any]] = [
        {"index": index, "object": "embedding", "embedding": _encoded(numbers) if encoding == "base64" else numbers}
        for index, numbers in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    answer = {"id": heading.id, "object": "list", "created": heading.created, "model": heading.model}
    return encode({**answer, "data": data, "usage": usage})


def _encoded(numbers: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
