"""Edits a valid JSON request body before it goes to an engine."""

from collections.abc import Collection
from typing import Any

import msgspec

from pointsman.primitives import Tenant

SALT_FIELD = "cache_salt"
TENANT_FIELD, TENANT_ARGUMENT = "vllm_xargs", "pointsman_client"  # read by `shared/pointsman_vllm`

_ASK_USAGE = b'"stream_options":{"include_usage":true}'
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def without(body: bytes, names: Collection[str]) -> bytes:
    kept = {name: value for name, value in _fields.decode(body).items() if name not in names}
    return msgspec.json.encode(kept)


def impose_salt(body: bytes, salt: str, *, replaces: bool) -> bytes:
    """`replaces`: the client sent one. `salt` needs no escapes."""
    if replaces:
        return msgspec.json.encode({**_fields.decode(body), SALT_FIELD: salt})
    return _with_last(body, b'"%b":"%b"' % (SALT_FIELD.encode(), salt.encode()))


def ask_for_usage(body: bytes) -> bytes:
    """Appended last, because the last of duplicate fields wins: the client's may have escapes in its name."""
    if b'"stream_options"' not in body:
        return _with_last(body, _ASK_USAGE)
    return _with(body, "stream_options", {"include_usage": True})


def add_tenant(body: bytes, tenant: Tenant) -> bytes:
    """Overrides the client's value. Appended last, because the last of duplicate fields wins."""
    if TENANT_FIELD.encode() not in body:
        return _with_last(body, b'"%b":%b' % (TENANT_FIELD.encode(), msgspec.json.encode({TENANT_ARGUMENT: tenant})))
    return _with(body, TENANT_FIELD, {TENANT_ARGUMENT: tenant})


def _with_last(body: bytes, field: bytes) -> bytes:
    end = body.rindex(b"}")
    before = body[:end]
    comma = b"" if before.rstrip().endswith(b"{") else b","
    return b"%b%b%b%b" % (before, comma, field, body[end:])


def _with(body: bytes, field: str, added: dict[str, Any]) -> bytes:
    fields = _fields.decode(body)
    known = msgspec.json.decode(fields[field]) if field in fields else None
    entries: dict[str, Any] = known if isinstance(known, dict) else {}
    return msgspec.json.encode({**fields, field: msgspec.Raw(msgspec.json.encode({**entries, **added}))})
