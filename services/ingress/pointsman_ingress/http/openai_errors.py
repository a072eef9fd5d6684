"""Refusals, in the shape that OpenAI clients expect. `anthropic_errors` has another.

A `Refusal` is raised wherever a request turns out to be impossible and answered in one place (`service`). The
`code` is for programs, the message for people; neither ever contains a key, a prompt or an engine's address.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.contracts.reasons import reject_answer
from pointsman.primitives import Seconds, Tokens

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable_error",
}

DO_NOT_RETRY = (b"x-should-retry", b"false")
"""Official OpenAI clients ask again by themselves after 408, 429 and 5xx, but for answers that say this."""

REASON_HEADER = b"x-pointsman-reject-reason"

NOBODY_WALL_SECONDS: Seconds = 5.0
"""When to ask again where nobody knows of an engine that comes. Who does is held again."""

RETRY_BUDGET_SPENT = "retry_budget_spent"
RETRY_REFUSED_WALL_SECONDS: Seconds = 2.0
"""By then the requests that are being tried again now have been answered, or their engine is ejected."""

NAMES_MAX = 20
"""Models that are named to a client that asked for another."""

_encode = msgspec.json.Encoder().encode


class Refusal(Exception):  # noqa: N818 - a refusal is an answer, not a defect
    """What the client is told instead of an answer. `headers` are sent along, lower-case names."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def body(self) -> bytes:
        return error_body(self.status, self.code, self.message, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """The OpenAI error object."""
    return _encode({"error": _error(status, code, message, param)})


def error_event(status: int, code: str, message: str) -> bytes:
    """The same as a server-sent event, for an answer that has begun already."""
    return b"data: " + error_body(status, code, message) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How the clients of an endpoint are told."""

    body: Callable[..., bytes]
    """Of (status, code, message, param): a whole answer."""
    event: Callable[[int, str, str], bytes]
    """Of (status, code, message): a server-sent event, for an answer that has begun already."""


OPENAI_ERRORS = ErrorShape(body=error_body, event=error_event)


def _error(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> Refusal:
    return Refusal(400, code, message, param=param)


def only_post() -> Refusal:
    return Refusal(405, "method_not_allowed", "This path takes POST only.", headers=((b"allow", b"POST"),))


def invalid_key() -> Refusal:
    return Refusal(
        401,
        "invalid_api_key",
        "No valid API key was given. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def unknown_model(model: str, known: Sequence[str]) -> Refusal:
    msg = f"The model {model[:200]!r} does not exist; there is: {_first_of(known)}."
    return Refusal(404, "model_not_found", msg, param="model")


def model_wanted(known: Sequence[str]) -> Refusal:
    return bad_request(f"Several models are served here; name one of them: {_first_of(known)}.", param="model")


def _first_of(models: Sequence[str]) -> str:
    """The first of them."""
    more = len(models) - NAMES_MAX
    return ", ".join(models[:NAMES_MAX]) + (f", and {more} more in /v1/models" if more > 0 else "")


def not_served(path: str) -> Refusal:
    """An endpoint that the ingress has and the engines of this model have not."""
    return Refusal(404, "endpoint_not_found", f"The engines of this model have no {path}.", param="model")


def too_long(prompt_tokens: Tokens, output_tokens: Tokens, model_len: Tokens, *, param: str) -> Refusal:
    """Begins with the words by which client libraries know it."""
    return bad_request(
        f"This model's maximum context length is {model_len} tokens; the prompt has {prompt_tokens} and {output_tokens} "
        "more were asked for. Shorten the prompt or ask for less.",
        param=param,
        code="context_length_exceeded",
    )


def body_too_large(bytes_max: int) -> Refusal:
    return Refusal(413, "body_too_large", f"The body is larger than {bytes_max} bytes, the most that is taken here.")


def timed_out(message: str) -> Refusal:
    return Refusal(408, "request_timeout", message)


def given_up() -> Refusal:
    """It had all the time that a request may take: once more would take as long."""
    return Refusal(408, "request_timeout", "The request took too long and was given up.", headers=(DO_NOT_RETRY,))


def stopped(code: str) -> Refusal:
    return _try_later(503, code, "This gateway is shutting down and cut the request short. Ask again.", 1.0)


def engine_failed(reason: str) -> Refusal:
    """`reason`: of the last one, where several were tried."""
    return Refusal(502, "engine_failed", f"No engine that was tried has answered: {reason}. Ask again.")


def retry_refused(reason: str) -> Refusal:
    """The engine failed it, and as many others as may are being tried again already."""
    message = f"An engine failed this request ({reason}) and too many others are being tried again. Ask again later."
    return _try_later(503, RETRY_BUDGET_SPENT, message, RETRY_REFUSED_WALL_SECONDS)


def engine_broke_off(reason: str) -> Refusal:
    return Refusal(502, "engine_failed", f"The engine broke off in the middle of its answer: {reason}. Ask again.")


def too_many_bodies() -> Refusal:
    return _try_later(503, "too_many_bodies", "Too many large bodies are being read. Ask again later.", 1.0)


def too_deep() -> Refusal:
    return bad_request("The body is nested too deeply.", code="malformed_body")


def no_engines() -> Refusal:
    return _try_later(
        503, "no_engines", "No engine is there that could be asked. Ask again later.", NOBODY_WALL_SECONDS
    )


def no_place() -> Refusal:
    return _try_later(
        503, "no_place", "Neither a scheduler nor an engine can be asked. Ask again later.", NOBODY_WALL_SECONDS
    )


def rejected(status: int, reason: str, detail: str, *, retry_after_wall: Seconds) -> Refusal:
    """What the scheduler refused, with its own status and reason."""
    found = detail or "the request was refused"
    answer = reject_answer(reason)
    message = f"{found[:1].upper()}{found[1:]}. {answer.advice}"
    if not answer.retryable:
        return Refusal(status, reason, message, headers=(DO_NOT_RETRY, (REASON_HEADER, reason.encode())))
    return _try_later(status, reason, message, retry_after_wall)


def _try_later(status: int, reason: str, message: str, retry_after_wall: Seconds) -> Refusal:
    retry = str(max(1, math.ceil(retry_after_wall))).encode()
    why = reason.encode("ascii", "replace").replace(b"\n", b" ").replace(b"\r", b" ")
    return Refusal(status, reason, message, headers=((b"retry-after", retry), (REASON_HEADER, why)))
