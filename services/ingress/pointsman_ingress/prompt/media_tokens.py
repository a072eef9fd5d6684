"""Estimates the tokens of images, audio, video and prompt vectors, which only an engine can count. They have no block
keys: they tell how long a prompt takes, not what it holds."""

from typing import Any

from pointsman.primitives import Tokens
from pointsman_ingress.prompt.content_parts import Message, kind_of

IMAGE_TOKENS: Tokens = 1_000
VIDEO_TOKENS: Tokens = 8_000
AUDIO_TOKENS_MIN: Tokens = 250  # also where a URL does not tell its length
AUDIO_BYTES_A_TOKEN = 500  # Whisper: 50 tokens/s; 16 kB/s as MP3, 32 kB/s as WAV
VECTOR_BYTES = 8_192  # of a token: 4,096 numbers of 16 bits
DATA_URL_HEAD_MAX = 128
"""In which a media type stands."""


def media_tokens(messages: list[Message]) -> Tokens:
    return sum(
        tokens_of_kind(kind_of(part), part)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def tokens_of_kind(kind: str, content: Any) -> Tokens:
    """`kind`: of a content part, or a media type. 0 if it names none of the three."""
    if "image" in kind:
        return IMAGE_TOKENS
    if "video" in kind:
        return VIDEO_TOKENS
    if "audio" in kind:
        return max(AUDIO_TOKENS_MIN, _bytes(content) // AUDIO_BYTES_A_TOKEN)
    return 0


def is_data_url(text: str) -> bool:
    return text.startswith("data:") and ";base64," in text[:DATA_URL_HEAD_MAX]


def data_url_tokens(url: str) -> Tokens:
    """Of an unknown type as many as of an image."""
    return tokens_of_kind(url.partition(";")[0], url) or IMAGE_TOKENS


def vector_tokens(encoded: str) -> Tokens:
    return 1 + _bytes(encoded) // VECTOR_BYTES


def _bytes(given: Any) -> int:
    """Of the longest text in it, as base64."""
    if isinstance(given, dict):
        return max(map(_bytes, given.values()), default=0)
    return len(given) * 3 // 4 if isinstance(given, str) else 0
