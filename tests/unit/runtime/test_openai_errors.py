"""What a server refuses before it knows the request has the same shape and types as its API's errors."""

import json

import pytest

from pointsman.runtime.http_protocol import RefusedError, openai_refusal


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (408, "timeout_error"),
        (429, "rate_limit_error"),
        (431, "invalid_request_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_a_refusal_has_the_type_of_its_status(status: int, kind: str) -> None:
    body = json.loads(openai_refusal(b"/readyz", RefusedError(status, "malformed", "Why.")))

    assert body == {"error": {"message": "Why.", "type": kind, "param": None, "code": "malformed"}}
