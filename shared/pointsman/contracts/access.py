"""API keys of clients, in the bucket `POINTSMAN_ACCESS`, and the event of their changes."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.envelope import Event
from pointsman.primitives import Listed, Moment, Name, Tenant

KeyDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]
KeyId = Annotated[str, Meta(pattern="^[a-z0-9]{1,32}$")]
KeyAction = Literal["create", "rotate", "revoke"]


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


class ApiKeyChanged(Event, frozen=True, kw_only=True):
    """A decision of the leader, for the record; State ignores it. `by`: the operator."""

    key: KeyId
    tenant: Tenant
    action: KeyAction
    by: Name = ""
