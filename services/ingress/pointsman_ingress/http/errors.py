"""Client errors in OpenAI's or Anthropic's format, also as events of their streams. Messages contain no keys, prompts
or engine addresses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pointsman.contracts.commands import RouteRejected
from pointsman.contracts.overlap import OverlapRefusal, OverlapRefused
from pointsman.contracts.reasons import FailReason, RejectReason, reject_answer
from pointsman.contracts.tenants import RateLimits
from pointsman.primitives import EngineSeconds, Seconds, Tokens
from pointsman.runtime.openai_errors import openai_error

NO_RETRY_HEADER = (b"x-should-retry", b"false")  # OpenAI's clients retry 408, 429 and 5xx
REASON_HEADER = b"x-pointsman-reject-reason"
MODEL_NAMES_MAX = 20

Header = tuple[bytes, bytes]
_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """`headers`: lower-case names. `openai_type`: instead of the status's."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[Header, ...] = (),
        openai_type: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers
        self.openai_type = openai_type


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """`event_data`: of a stream's error event, after so many other events; None: the same as `body`. `id_headers`: further
    ones by which clients of the API tell a request."""

    body: Callable[[ApiError], bytes]
    event_head: bytes
    event_data: Callable[[ApiError, int], bytes] | None = None
    id_headers: tuple[bytes, ...] = ()

    def event(self, error: ApiError, events: int) -> bytes:
        data = self.event_data(error, events) if self.event_data is not None else self.body(error)
        return self.event_head + data + b"\n\n"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _openai_body(error: ApiError) -> bytes:
    return openai_error(error.status, error.code, error.message, param=error.param, kind=error.openai_type)


def _responses_event(error: ApiError, events: int) -> bytes:
    """Events of the Responses API are numbered from 0."""
    fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return _encode({**fields, "sequence_number": events})


def _anthropic_body(error: ApiError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}})


OPENAI_ERRORS = ErrorShape(_openai_body, b"data: ")
RESPONSES_ERRORS = ErrorShape(_openai_body, b"event: error\ndata: ", _responses_event)
ANTHROPIC_ERRORS = ErrorShape(_anthropic_body, b"event: error\ndata: ", id_headers=(b"request-id",))
MESSAGES_PATH = b"/v1/messages"


def errors_at(url: bytes) -> ErrorShape:
    """Of a path that no endpoint has, and of a request that is refused before its endpoint is known."""
    path = url.partition(b"?")[0]
    return ANTHROPIC_ERRORS if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + b"/") else OPENAI_ERRORS


@dataclass(frozen=True, slots=True)
class _Kind:
    """An error without arguments. `retry_after`: wall seconds."""

    status: int
    code: str
    message: str
    headers: tuple[Header, ...] = ()
    retry_after: EngineSeconds | None = None

    def __call__(self) -> ApiError:
        if self.retry_after is not None:
            return _retry_later(self.status, self.code, self.message, self.retry_after)
        return ApiError(self.status, self.code, self.message, headers=self.headers)


invalid_credential = _Kind(
    401,
    "invalid_api_key",
    "No valid API key was given. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    ((b"www-authenticate", b"Bearer"),),
)
credentials_unread = _Kind(
    503, "credentials_unread", "Credentials cannot be checked yet. Ask again later.", retry_after=1.0
)
foreign_page = _Kind(
    403,
    "cross_site",
    "The request comes from a page of another site. Your operator can name that page's origin with --cors-origin.",
)
engine_key_refused = _Kind(
    502,
    FailReason.ENGINE_FAILED.value,
    "The engine refused the key of this gateway. Ask your operator to check its engine key; yours is not to blame.",
    (NO_RETRY_HEADER,),
)
post_only = _Kind(405, "method_not_allowed", "This path takes POST only.", ((b"allow", b"POST"),))
not_json = _Kind(400, "unsupported_media_type", "The body must be JSON, and the content-type application/json.")
encoded_body = _Kind(
    415, "unsupported_media_type", "The body must not be compressed: send it as it is, without content-encoding."
)
request_too_large = _Kind(
    413,
    FailReason.REQUEST_TOO_LARGE.value,
    "The request is too large for the message bus of this gateway. Send a shorter prompt, or ask your operator to raise "
    "`max_payload`.",
)
nested_too_deeply = _Kind(400, "malformed_body", "The body is nested too deeply.")
too_complex = _Kind(400, "body_too_complex", "The body has too many lists, objects or entries.")
body_too_slow = _Kind(408, "request_timeout", "The body did not arrive in time.")
request_timeout = _Kind(408, "request_timeout", "The request took too long and was given up.", (NO_RETRY_HEADER,))
internal_error = _Kind(500, FailReason.INTERNAL_ERROR.value, "The gateway made a mistake; it has been logged.")
too_many_bodies = _Kind(
    503,
    FailReason.TOO_MANY_BODIES.value,
    "Too many large bodies or answers are being read. Ask again later.",
    retry_after=1.0,
)
no_engines = _Kind(503, "no_engines", "No engine is there that could be asked. Ask again later.", retry_after=5.0)
no_place = _Kind(
    503, FailReason.NO_PLACE.value, "Neither a scheduler nor an engine can be asked. Ask again later.", retry_after=5.0
)
ingress_stopped = _Kind(
    503,
    "ingress_stopped",
    "This gateway is shutting down and cut the request short. Ask again.",
    retry_after=1.0,
)


no_scheduler = _Kind(503, "no_scheduler", "No scheduler has answered. Ask again later.", retry_after=1.0)
too_many_lookups = _Kind(429, "too_many_lookups", "Too many lookups at once. Ask again later.", retry_after=1.0)


def overlap_refused(answer: OverlapRefused) -> ApiError:
    message = f"{answer.detail[:1].upper()}{answer.detail[1:]}."
    if answer.reason != OverlapRefusal.TOO_OFTEN:
        return bad_request(message, code=answer.reason)
    milliseconds = b"%d" % math.ceil(answer.retry_after * 1000)
    headers = (_retry_after(answer.retry_after), (b"retry-after-ms", milliseconds))
    return ApiError(429, answer.reason, message, headers=headers)


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    return ApiError(400, code, message, param=param)


def endpoint_out_of_scope(path: str) -> ApiError:
    return ApiError(403, "endpoint_not_allowed", f"This credential may not use {path}.")


def model_out_of_scope(model: str) -> ApiError:
    return ApiError(403, "model_not_allowed", f"This credential may not use the model {model[:200]!r}.", param="model")


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    others = f"; there is: {_model_list(known)}" if known else ""
    message = f"The model {model[:200]!r} does not exist{others}."
    return ApiError(404, "model_not_found", message, param="model")


def model_required(known: Sequence[str]) -> ApiError:
    return bad_request(f"Several models are served here; name one of them: {_model_list(known)}.", param="model")


def _model_list(models: Sequence[str]) -> str:
    more = len(models) - MODEL_NAMES_MAX
    return ", ".join(models[:MODEL_NAMES_MAX]) + (f", and {more} more in /v1/models" if more > 0 else "")


def endpoint_not_found(path: str) -> ApiError:
    return ApiError(404, "endpoint_not_found", f"The engines of this model have no {path}.", param="model")


def context_too_long(prompt_tokens: Tokens, model_len: Tokens, *, param: str) -> ApiError:
    no_room = " and leaves no room for an answer" if prompt_tokens == model_len else ""
    return _too_long(model_len, f"the prompt has {prompt_tokens}{no_room}. Shorten it.", param)


def output_too_long(output_tokens: Tokens, model_len: Tokens, *, param: str) -> ApiError:
    """Of a prompt of any length, which need not be known."""
    return _too_long(model_len, f"`{param}` asks for {output_tokens}. Ask for less.", param)


def prompt_too_long(tokens_min: Tokens, model_len: Tokens, *, param: str) -> ApiError:
    return _too_long(model_len, f"the prompt has more than {tokens_min}. Shorten it.", param)


def _too_long(model_len: Tokens, problem: str, param: str) -> ApiError:
    """Client libraries match the first words of the message."""
    message = f"This model's maximum context length is {model_len} tokens; {problem}"
    return bad_request(message, param=param, code="context_length_exceeded")


def body_too_large(bytes_max: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The body is larger than {bytes_max} bytes, the most that is taken here.")


def answer_too_large(bytes_max: int) -> ApiError:
    return ApiError(
        502,
        FailReason.ANSWER_TOO_LARGE.value,
        f"The engine's answer is larger than {bytes_max} bytes, the most that is passed on whole. Ask for less at once, or for a "
        "stream.",
        headers=(NO_RETRY_HEADER,),
    )


def engine_failed(reason: str) -> ApiError:
    return ApiError(502, FailReason.ENGINE_FAILED.value, f"No engine that was tried has answered: {reason}. Ask again.")


def engine_broke_off(reason: str) -> ApiError:
    return ApiError(
        502, FailReason.ENGINE_FAILED.value, f"The engine broke off in the middle of its answer: {reason}. Ask again."
    )


def retry_budget_spent(reason: str) -> ApiError:
    """Retry-After 2 s: by then current retries are answered or their engine is ejected."""
    message = f"An engine failed this request ({reason}) and too many others are being tried again. Ask again later."
    return _retry_later(503, FailReason.RETRY_BUDGET_SPENT.value, message, 2.0)


def rejected(answer: RouteRejected, *, speed: float, limit_headers: Sequence[Header] = ()) -> ApiError:
    reason, known = answer.reason, reject_answer(answer.reason)
    detail = answer.detail or "the request was refused"
    message = f"{detail[:1].upper()}{detail[1:]}. {known.advice}"
    retry_after_wall = answer.retry_after / speed
    code, kind = _limit_code(answer)
    headers = [*limit_headers, (REASON_HEADER, _one_line(reason))]
    if not known.retryable:
        headers.append(NO_RETRY_HEADER)
    if known.retryable or kind:
        headers.append(_retry_after(retry_after_wall))
    if known.retryable and kind and retry_after_wall > 0:  # preferred by OpenAI's and Anthropic's clients
        headers.append((b"retry-after-ms", b"%d" % math.ceil(retry_after_wall * 1000)))
    return ApiError(answer.status, code or reason, message, headers=tuple(headers), openai_type=kind)


def _limit_code(answer: RouteRejected) -> tuple[str, str]:
    """`code` and `type` of OpenAI's errors for limits of a tenant; empty for other reasons."""
    if answer.reason == RejectReason.QUOTA_EXCEEDED:
        return "insufficient_quota", "insufficient_quota"
    if answer.reason not in (RejectReason.RATE_LIMITED, RejectReason.CONCURRENCY_EXCEEDED):
        return "", ""
    limits = answer.limits or RateLimits()
    has_requests_left = limits.requests is None or limits.requests.remaining > 0
    of_tokens = answer.reason == RejectReason.RATE_LIMITED and limits.tokens is not None and has_requests_left
    return "rate_limit_exceeded", "tokens" if of_tokens else "requests"


def _retry_later(status: int, reason: str, message: str, wall_seconds: Seconds) -> ApiError:
    return ApiError(status, reason, message, headers=(_retry_after(wall_seconds), (REASON_HEADER, _one_line(reason))))


def _retry_after(wall_seconds: Seconds) -> Header:
    return b"retry-after", b"%d" % max(1, math.ceil(wall_seconds))


def _one_line(reason: str) -> bytes:
    return reason.encode("ascii", "replace").replace(b"\n", b" ").replace(b"\r", b" ")
