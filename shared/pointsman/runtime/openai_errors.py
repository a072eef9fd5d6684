"""Errors in OpenAI's shape."""

import msgspec

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable_error",
}
_encode = msgspec.json.Encoder().encode


def openai_error(status: int, code: str, message: str, *, param: str | None = None, kind: str = "") -> bytes:
    """The body, JSON. `kind`: its type, instead of the status's."""
    kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
