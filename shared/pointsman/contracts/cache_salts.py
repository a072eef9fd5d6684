"""Cache isolation: which cache group a tenant belongs to, and the `cache_salt` that engines and block keys get for it.
Two requests can share cached blocks only if their salts are equal. The client's own salt refines the group's; it never
replaces it."""

import hashlib
import hmac
from collections.abc import Callable

from pointsman.primitives import Name, Tenant

SALT_CHARACTERS = 43  # hexadecimal; vLLM takes at most 128 characters, and no @, /, \\ or NUL
PROBE_GROUP = "probe"
_LABEL = b"pointsman-cache-salt-1\x00"


class CacheSalts:
    def __init__(self, secret: bytes, shared_group: Callable[[Tenant], str]) -> None:
        """`shared_group`: name of the group that an operator declared for the tenant; empty: it shares with nobody."""
        self._secret = secret
        self._shared_group = shared_group

    def group(self, tenant: Tenant) -> Name:
        """Tenants and groups have separate name spaces: a tenant called `public` is not in the group `public`."""
        shared = self._shared_group(tenant)
        return f"group:{shared}" if shared else f"tenant:{tenant}"

    def salt(self, group: Name, client_salt: str) -> str:
        """`client_salt` may be empty."""
        message = b"%b%d\x00%b%b" % (_LABEL, len(group), group.encode(), client_salt.encode("utf-8", "surrogatepass"))
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:SALT_CHARACTERS]
