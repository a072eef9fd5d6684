"""The paths that lead to engines: how a body is read on each, what its stream looks like, and who says where it goes."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman_ingress.anthropic_errors import ANTHROPIC_ERRORS
from pointsman_ingress.openai_errors import OPENAI_ERRORS, ErrorShape
from pointsman_ingress.openai_requests import (
    Asked,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_messages,
    parse_named,
    parse_response,
)
from pointsman_ingress.streams import CHUNKS, MESSAGE_EVENTS, NAMED_EVENTS, StreamShape


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of them."""

    path: str
    parse: Callable[[bytes], Asked]
    shape: StreamShape = CHUNKS
    placed: bool = True
    """Whether a scheduler says where it goes. Otherwise any engine of the pool will do, and the log does not hear of it."""
    splits: bool = False
    """Whether one engine may prefill it and another decode."""
    errors: ErrorShape = OPENAI_ERRORS


COMPLETIONS = Endpoint("/v1/completions", parse_completion, splits=True)
CHAT_COMPLETIONS = Endpoint("/v1/chat/completions", parse_chat, splits=True)
RESPONSES = Endpoint("/v1/responses", parse_response, NAMED_EVENTS)
MESSAGES = Endpoint("/v1/messages", parse_messages, MESSAGE_EVENTS, errors=ANTHROPIC_ERRORS)
COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", parse_named, placed=False, errors=ANTHROPIC_ERRORS)
EMBEDDINGS = Endpoint("/v1/embeddings", parse_embeddings)
TOKENIZE = Endpoint("/tokenize", parse_named, placed=False)
DETOKENIZE = Endpoint("/detokenize", parse_named, placed=False)

BY_PATH = {
    endpoint.path: endpoint
    for endpoint in (
        COMPLETIONS,
        CHAT_COMPLETIONS,
        RESPONSES,
        MESSAGES,
        COUNT_TOKENS,
        EMBEDDINGS,
        TOKENIZE,
        DETOKENIZE,
    )
}
