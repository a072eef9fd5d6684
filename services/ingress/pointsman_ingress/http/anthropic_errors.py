"""Refusals in the shape that Anthropic's clients expect. These have no `code`: the message says what it is."""

import msgspec

from pointsman_ingress.http.openai_errors import ErrorShape

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


def _body(status: int, code: str, message: str, param: str | None = None) -> bytes:  # noqa: ARG001 - has no place here
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def _event(status: int, code: str, message: str) -> bytes:
    return b"event: error\ndata: " + _body(status, code, message) + b"\n\n"


ANTHROPIC_ERRORS = ErrorShape(body=_body, event=_event)
