"""The paths that lead to engines: how a body is read on each, what its stream looks like, and who says where it goes."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman_ingress.engine.streams import CHUNKS, MESSAGE_EVENTS, NAMED_EVENTS, StreamShape
from pointsman_ingress.http.anthropic_errors import ANTHROPIC_ERRORS
from pointsman_ingress.http.openai_errors import OPENAI_ERRORS, ErrorShape
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.prompt.openai_requests import (
    ParsedRequest,
    parse_audio,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_messages,
    parse_named,
    parse_pairs,
    parse_pooled,
    parse_response,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of them."""

    path: str
    parse: Callable[[bytes], ParsedRequest] | None
    """Of a JSON body. None where it is a form."""
    shape: StreamShape = CHUNKS
    placed: bool = True
    """Whether a scheduler says where it goes. Otherwise any engine of the pool will do, and the log does not hear of it."""
    splits: bool = False
    """Whether one engine may prefill it and another decode."""
    errors: ErrorShape = OPENAI_ERRORS

    def read(self, body: bytes, headers: Headers) -> ParsedRequest:
        """What the client asks for. Raises Refusal."""
        if self.parse is None:
            return parse_audio(body, headers.get(b"content-type", b""))
        return self.parse(body)

    def content_type(self, headers: Headers) -> str:
        """As engines are told: a form's holds its boundary."""
        return headers.get(b"content-type", b"").decode("latin-1") if self.parse is None else "application/json"


COMPLETIONS = Endpoint("/v1/completions", parse_completion, splits=True)
CHAT_COMPLETIONS = Endpoint("/v1/chat/completions", parse_chat, splits=True)
RESPONSES = Endpoint("/v1/responses", parse_response, NAMED_EVENTS)
MESSAGES = Endpoint("/v1/messages", parse_messages, MESSAGE_EVENTS, errors=ANTHROPIC_ERRORS)
COUNT_TOKENS = Endpoint("/v1/messages/count_tokens", parse_named, placed=False, errors=ANTHROPIC_ERRORS)
EMBEDDINGS = Endpoint("/v1/embeddings", parse_embeddings)
PAIRS = tuple(Endpoint(path, parse_pairs) for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"))
POOLED = tuple(Endpoint(path, parse_pooled) for path in ("/pooling", "/classify"))
AUDIO = tuple(Endpoint(f"/v1/audio/{what}", None) for what in ("transcriptions", "translations"))
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
        *PAIRS,
        *POOLED,
        *AUDIO,
        TOKENIZE,
        DETOKENIZE,
    )
}
