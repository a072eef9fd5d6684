"""API keys of clients, in the bucket `POINTSMAN_ACCESS`, and the event of their changes."""

import hmac
import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.envelope import Event
from pointsman.primitives import Listed, Moment, Name, Tenant

KeyDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]
KeyId = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
KeyAction = Literal["create", "rotate", "revoke"]
PATTERNS_MAX = 100
KEY_BYTES_MAX = 256 * 1024
_DIGEST_PURPOSE = b"pointsman API keys"
_PROOF_PURPOSE = b"pointsman API keys: proof of "
KEY_NAMES = "key."
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:|/+=-]{0,127}")
ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/pooling",
    "/classify",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
    "/kv/overlap",
)
"""Paths that a key may be restricted to. /v1/models is for all keys, /kv/overlap only for those that name it."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`digest`: HMAC-SHA256 of the key with the deployment's secret. Times: wall, Unix seconds; 0: never. `models`,
    `endpoints`: patterns of what it may use; empty: all."""

    id: KeyId
    digest: KeyDigest
    tenant: Tenant
    created_at: Moment
    created_by: Name = ""
    expires_at: Moment = 0.0
    revoked_at: Moment = 0.0
    models: Annotated[list[Name], Listed] = []
    endpoints: Annotated[list[Name], Listed] = []


def decode_key(payload: bytes) -> ApiKey:
    """Raises ValueError."""
    if len(payload) > KEY_BYTES_MAX:
        raise ValueError(f"{len(payload)} bytes are more than {KEY_BYTES_MAX}")
    try:
        return _keys.decode(payload)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def key_hash(secret: str) -> Callable[[bytes], bytes]:
    """Digest of an API key in this deployment."""
    own_secret = hmac.digest(secret.encode(), _DIGEST_PURPOSE, "sha256")
    return lambda key: hmac.digest(own_secret, key, "sha256")


def secret_proof(secret: str, key_id: str) -> bytes:
    """Shows the leader that a key was hashed with its own secret."""
    return hmac.digest(secret.encode(), _PROOF_PURPOSE + key_id.encode(), "sha256")


def name_of_key(key: str) -> str:
    """Its key in the bucket."""
    return KEY_NAMES + key


def valid_tenant(name: str) -> bool:
    """Tenants that credentials name. Safe in tables, labels and spreadsheets."""
    return _TENANT.fullmatch(name) is not None


def scope_refusal(models: list[str], endpoints: list[str]) -> str:
    """Why these are no scopes, or ""."""
    if len(models) > PATTERNS_MAX or len(endpoints) > PATTERNS_MAX:
        return f"more than {PATTERNS_MAX} models or endpoints"
    if not all(pattern and pattern.isprintable() and len(pattern) <= 256 for pattern in models):
        return "a model's pattern is empty, not printable or longer than 256 characters"
    unknown = next((endpoint for endpoint in endpoints if endpoint not in ENDPOINTS), None)
    return f"there is no endpoint {unknown[:100]}; there are {', '.join(ENDPOINTS)}" if unknown is not None else ""


_keys = msgspec.json.Decoder(ApiKey)


class ApiKeyChanged(Event, frozen=True, kw_only=True):
    """A decision of the leader, for the record; State ignores it. `by`: the operator."""

    key: KeyId
    tenant: Tenant
    action: KeyAction
    by: Name = ""
