"""Paths served by engines: body parser, stream format and error format of each. `app.py` has the others: models, health,
metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman_ingress.engine.streams import CHUNKS, MESSAGE_EVENTS, NAMED_EVENTS, StreamShape
from pointsman_ingress.http.errors import ANTHROPIC_ERRORS, OPENAI_ERRORS, ErrorShape, not_json
from pointsman_ingress.http.rate_limits import LimitHeaders, anthropic_limits, openai_limits
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.prompt.json_form import LIGHT_BYTES_MAX, is_light
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.openai_requests import (
    ParsedRequest,
    parse_audio,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_model_only,
    parse_pairs,
    parse_pooled,
)
from pointsman_ingress.prompt.responses_input import parse_response

JSON = b"application/json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    parse: Callable[[bytes], ParsedRequest] | None  # None: a form
    shape: StreamShape = CHUNKS
    placed: bool = True  # if not, any engine of the pool serves it and nothing is logged
    splittable: bool = False
    errors: ErrorShape = OPENAI_ERRORS
    limit_headers: LimitHeaders = openai_limits

    def check_content_type(self, headers: Headers) -> None:
        """A web page may post forms and plain text anywhere, but JSON only to whom allows it. Raises ApiError."""
        sent = headers.get(b"content-type", b"")
        if self.parse is not None and sent != JSON and sent.partition(b";")[0].strip().lower() != JSON:
            raise not_json()

    def is_light(self, body: bytes) -> bool:
        return is_light(body) if self.parse is not None else len(body) <= LIGHT_BYTES_MAX

    def read(self, body: bytes, headers: Headers) -> ParsedRequest:
        """Raises ApiError."""
        if self.parse is None:
            return parse_audio(body, headers.get(b"content-type", b""))
        return self.parse(body)

    def content_type(self, headers: Headers) -> str:
        return headers.get(b"content-type", b"").decode("latin-1") if self.parse is None else "application/json"


COMPLETIONS = Endpoint("/v1/completions", parse_completion, splittable=True)
CHAT_COMPLETIONS = Endpoint("/v1/chat/completions", parse_chat, splittable=True)

_ENDPOINTS = (
    COMPLETIONS,
    CHAT_COMPLETIONS,
    Endpoint("/v1/responses", parse_response, NAMED_EVENTS),
    Endpoint("/v1/messages", parse_messages, MESSAGE_EVENTS, errors=ANTHROPIC_ERRORS, limit_headers=anthropic_limits),
    Endpoint("/v1/messages/count_tokens", parse_model_only, placed=False, errors=ANTHROPIC_ERRORS),
    Endpoint("/v1/embeddings", parse_embeddings),
    *(Endpoint(path, parse_pairs) for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")),
    *(Endpoint(path, parse_pooled) for path in ("/pooling", "/classify")),
    *(Endpoint(f"/v1/audio/{kind}", None) for kind in ("transcriptions", "translations")),
    *(Endpoint(path, parse_model_only, placed=False) for path in ("/tokenize", "/detokenize")),
)
BY_PATH = {endpoint.path: endpoint for endpoint in _ENDPOINTS}
