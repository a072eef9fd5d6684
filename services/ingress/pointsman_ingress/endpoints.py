"""Paths served by engines: body parser, permitted fields, stream and error format of each. `app.py` has
`/v1/models`; probes and metrics are on the admin port."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pointsman_ingress.engine.body_rewrites import without
from pointsman_ingress.engine.streams import CHUNKS, MESSAGE_EVENTS, NAMED_EVENTS, StreamShape
from pointsman_ingress.http.errors import (
    ANTHROPIC_ERRORS,
    OPENAI_ERRORS,
    RESPONSES_ERRORS,
    ErrorShape,
    bad_request,
    not_json,
)
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX, check_text, is_light
from pointsman_ingress.http.rate_limits import LimitHeaders, anthropic_limits, openai_limits
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.prompt import body_fields
from pointsman_ingress.prompt.body_fields import FieldRules
from pointsman_ingress.prompt.messages_input import parse_messages
from pointsman_ingress.prompt.openai_requests import (
    parse_audio,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_model_only,
    parse_pairs,
    parse_pooled,
)
from pointsman_ingress.prompt.parsed_request import ParsedRequest
from pointsman_ingress.prompt.remote_media import MediaRules
from pointsman_ingress.prompt.responses_input import parse_response

JSON = b"application/json"
ENCODING = "encoding_format"


def is_json(headers: Headers) -> bool:
    sent = headers.get(b"content-type", b"")
    return sent == JSON or sent.partition(b";")[0].strip().lower() == JSON


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    parse: Callable[[bytes], ParsedRequest] | None  # None: a form
    fields: frozenset[str]  # that clients may send
    shape: StreamShape = CHUNKS
    placed: bool = True  # if not, any engine of the pool serves it and nothing is logged
    splittable: bool = False
    errors: ErrorShape = OPENAI_ERRORS
    limit_headers: LimitHeaders = openai_limits

    @property
    def gives_tensors(self) -> bool:
        """Whether its answers may be tensors, as bytes."""
        return ENCODING in self.fields

    def check_content_type(self, headers: Headers) -> None:
        """Raises ApiError (400, as vLLM answers)."""
        if self.parse is not None and not is_json(headers):
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


@dataclass(frozen=True, slots=True)
class AcceptedBody:
    """`content`: what may go to engines. `dropped`: names of fields that do not, for a header. `salted`: the client sent
    `cache_salt`."""

    request: ParsedRequest
    content: bytes
    dropped: str = ""
    salted: bool = False


@dataclass(frozen=True, slots=True)
class BodyRules:
    fields: FieldRules
    media: MediaRules

    def accept(self, endpoint: Endpoint, body: bytes, headers: Headers) -> AcceptedBody:
        """Raises ApiError."""
        request = endpoint.read(body, headers)
        if endpoint.parse is None:
            self.fields.check_form(request.form_fields)
            return AcceptedBody(request, body)
        try:
            checked = self.fields.check(body, endpoint.fields)
            if left_out := request.nulls.union(checked.dropped):
                body = without(body, left_out)
                request = endpoint.read(body, headers)
            self.media.check(body)
            check_text(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in fields that `read` skips
            raise bad_request(f"The body is not valid JSON: {error}.", code="malformed_body") from error
        return AcceptedBody(request, body, checked.dropped_shown, checked.salted)


COMPLETIONS = Endpoint("/v1/completions", parse_completion, body_fields.COMPLETION, splittable=True)
CHAT_COMPLETIONS = Endpoint("/v1/chat/completions", parse_chat, body_fields.CHAT, splittable=True)

_ENDPOINTS = (
    COMPLETIONS,
    CHAT_COMPLETIONS,
    Endpoint("/v1/responses", parse_response, body_fields.RESPONSE, NAMED_EVENTS, errors=RESPONSES_ERRORS),
    Endpoint(
        "/v1/messages",
        parse_messages,
        body_fields.MESSAGES,
        MESSAGE_EVENTS,
        errors=ANTHROPIC_ERRORS,
        limit_headers=anthropic_limits,
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        parse_model_only,
        body_fields.COUNT_TOKENS,
        placed=False,
        errors=ANTHROPIC_ERRORS,
    ),
    Endpoint("/v1/embeddings", parse_embeddings, body_fields.EMBEDDINGS),
    *(
        Endpoint(path, parse_pairs, body_fields.PAIRS)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")
    ),
    *(Endpoint(path, parse_pooled, body_fields.POOLED) for path in ("/pooling", "/classify")),
    *(Endpoint(f"/v1/audio/{kind}", None, body_fields.AUDIO) for kind in ("transcriptions", "translations")),
    Endpoint("/tokenize", parse_model_only, body_fields.TOKENIZE, placed=False),
    Endpoint("/detokenize", parse_model_only, body_fields.DETOKENIZE, placed=False),
)
BY_PATH = {endpoint.path: endpoint for endpoint in _ENDPOINTS}
