"""Rewrites of a request body on its way to an engine: in, a JSON object that was parsed before; out, the changed bytes."""

from typing import Any

import msgspec

from pointsman.primitives import Tenant

TENANT_FIELD, TENANT_ARGUMENT = "vllm_xargs", "pointsman_client"
"""What vLLM passes on to its scheduler; `shared/pointsman_vllm` reads it there."""

_ASK_USAGE = b'"stream_options":{"include_usage":true},'
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def ask_for_usage(body: bytes) -> bytes:
    """Have the engine send the usage at the end of its stream."""
    if b'"stream_options"' not in body:
        start = body.index(b"{") + 1
        return body[:start] + _ASK_USAGE + body[start:]
    return _with(body, "stream_options", {"include_usage": True})


def add_tenant(body: bytes, tenant: Tenant) -> bytes:
    """Name the tenant to the engine; what the client wrote there does not count. The field comes last, where it wins over
    one that the client spelled with escapes."""
    if TENANT_FIELD.encode() not in body:
        end = body.rindex(b"}")
        field = b',"%b":%b' % (TENANT_FIELD.encode(), msgspec.json.encode({TENANT_ARGUMENT: tenant}))
        return body[:end] + field + body[end:]
    return _with(body, TENANT_FIELD, {TENANT_ARGUMENT: tenant})


def _with(body: bytes, field: str, added: dict[str, Any]) -> bytes:
    fields = _fields.decode(body)
    known = msgspec.json.decode(fields[field]) if field in fields else None
    entries: dict[str, Any] = known if isinstance(known, dict) else {}
    return msgspec.json.encode({**fields, field: msgspec.Raw(msgspec.json.encode({**entries, **added}))})
