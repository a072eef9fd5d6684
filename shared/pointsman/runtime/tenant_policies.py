"""The deployment's tenant policies, as the key-value store has them. A missing or broken document changes nothing: the
last good one stays."""

import msgspec
import structlog

from pointsman.contracts.codec import short_reason
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.ports import KeyValueStore, StoredValue, ValuesRead
from pointsman.primitives import Tenant

log = structlog.get_logger()

TENANTS_KEY = "tenants"

_decoder = msgspec.json.Decoder(TenantPolicies)
_DEFAULTS = TenantPolicies()


class FollowedPolicies:
    """`newest`: None if there was no document so far."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._written = 0
        """Revision of our own write since the last read."""
        self.newest: TenantPolicies | None = None

    def of(self, tenant: Tenant) -> TenantPolicy:
        return (self.newest or _DEFAULTS).of(tenant)

    async def follow(self) -> None:
        """Runs without end."""
        async for read in self._store.follow():
            self.take(read)

    def take(self, read: ValuesRead) -> None:
        """A read may have begun before our own write: then what it found counts only if it is newer."""
        written, self._written = self._written, 0
        for stored in read.values:
            if stored.key == TENANTS_KEY and stored.revision > written:
                self._note(stored)

    def wrote(self, stored: StoredValue) -> None:
        self._written = stored.revision
        self._note(stored)

    def _note(self, stored: StoredValue) -> None:
        try:
            self.newest = _decoder.decode(stored.value)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.warning("tenant_policies_unreadable", revision=stored.revision, reason=short_reason(error))
            return
        log.info("tenant_policies_read", revision=stored.revision, tenants=len(self.newest.tenants))
