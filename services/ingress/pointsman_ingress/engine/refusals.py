"""What an engine's refusal says, also as a client with a key may see it: the reason, without addresses and paths."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from pointsman.contracts.reasons import FailReason
from pointsman_ingress.engine.usage import try_decode
from pointsman_ingress.http.errors import ApiError, Header

MESSAGE_CHARACTERS_MAX = 500
REFUSAL_BYTES_MAX = 64 * 1024  # longer ones are not read
NOT_IMPLEMENTED = 501
TOO_MANY_REQUESTS = 429
SERVICE_UNAVAILABLE = 503  # a failure unless the engine says that it is busy

_LACKS_API = re.compile(rb"does not support [^\"]{1,100} API\b")
_ADDRESSES = re.compile(
    r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+"
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]+\](?::\d+)?"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?:\d{2,5}\b"
    r"|(?<![\w/])/(?:[\w.@+-]+/)+[\w.@+-]*"
)
_any = msgspec.json.Decoder(dict[str, Any])


def refused_by_engine(status: int, body: bytes, headers: Iterable[Header] = ()) -> ApiError:
    fields = _fields_of(body)
    message, param = fields.get("message"), fields.get("param")
    shown = without_addresses(message) if isinstance(message, str) and message else f"The engine answered {status}."
    return ApiError(
        status,
        FailReason.ENGINE_REFUSED.value,
        shown,
        param=without_addresses(param) if isinstance(param, str) else None,
        headers=tuple(headers),
    )


def lacks_endpoint(status: int, body: bytes) -> bool:
    """Whether the path is missing, not just the model. vLLM answers 501 also for parameters that it does not support."""
    if status == NOT_IMPLEMENTED:
        return _LACKS_API.search(body) is not None
    return status == 405 or (status == 404 and b'"Not Found"' in body)


def refusal_status(status: int) -> int:
    """As clients get it, which would send the same again after a 501."""
    return 400 if status == NOT_IMPLEMENTED else status


def is_busy(body: bytes) -> bool:
    """Whether the body of a 503 is vLLM's of a full queue, which another engine may not have (`GracefulHTTPError`). An engine
    that is dead or scaling, and a proxy before it, write something else."""
    return _fields_of(body).get("type") == "Service Unavailable"


def reason_in(body: bytes) -> str:
    """Without addresses; empty if the refusal tells none."""
    fields = _fields_of(body)
    reason = fields.get("message") or fields.get("detail")
    return without_addresses(reason) if isinstance(reason, str) else ""


def without_addresses(text: str) -> str:
    return _ADDRESSES.sub("(address)", text[:MESSAGE_CHARACTERS_MAX])


def _fields_of(body: bytes) -> dict[str, Any]:
    """Older engines have them at the top."""
    decoded = (try_decode(_any, body) if len(body) <= REFUSAL_BYTES_MAX else None) or {}
    error = decoded.get("error", decoded)
    return error if isinstance(error, dict) else {}
