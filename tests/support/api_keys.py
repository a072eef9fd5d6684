"""API keys of clients, as a leader writes them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.contracts.access import ApiKey, key_hash, name_of_key
from pointsman.ports import KeyValueStore
from pointsman.primitives import Tenant

SECRET = "pointsman-development"


def api_key(key: str, tenant: str, *, secret: str = SECRET, **fields: Any) -> ApiKey:
    """`key` is what a client sends; its id is made of it."""
    key_id = "".join(c for c in key.lower() if c.isalnum())[:32]
    told: dict[str, Any] = {
        "id": key_id,
        "digest": key_hash(secret)(key.encode()),
        "tenant": Tenant(tenant),
        "created_at": 1.0,
    }
    return ApiKey(**(told | fields))


async def put_key(store: KeyValueStore, key: ApiKey) -> None:
    name = name_of_key(key.id)
    known = await store.get(name)
    await store.put(name, msgspec.json.encode(key), after=known.revision if known is not None else 0)


async def put_keys(store: KeyValueStore, keys: Mapping[str, str], *, secret: str = SECRET) -> None:
    """`keys`: tenants by key."""
    for key, tenant in keys.items():
        await put_key(store, api_key(key, tenant, secret=secret))
