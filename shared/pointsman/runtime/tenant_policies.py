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
    """`newest`: None if there was no document so far. `revision`: of the stored document, readable or not; 0: none was
    found."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._noted = 0
        """Revision that `note` was told since the last read."""
        self.newest: TenantPolicies | None = None
        self.revision = 0

    def of(self, tenant: Tenant) -> TenantPolicy:
        return (self.newest or _DEFAULTS).of(tenant)

    async def follow(self) -> None:
        """Runs without end."""
        async for read in self._store.follow(TENANTS_KEY):
            self.take(read)

    def take(self, read: ValuesRead) -> None:
        """A read may have begun before `note`: then what it found counts only if it is newer."""
        noted, self._noted = self._noted, 0
        if read.whole and not noted:
            self.revision = 0
        for stored in read.values:
            if stored.key == TENANTS_KEY and stored.revision > noted:
                self._keep(stored)

    def note(self, stored: StoredValue | None) -> None:
        """What was written or found between two reads; None: no document."""
        self._noted = self.revision = stored.revision if stored else 0
        if stored:
            self._keep(stored)

    def _keep(self, stored: StoredValue) -> None:
        self.revision = stored.revision
        try:
            self.newest = _decoder.decode(stored.value)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            log.warning("tenant_policies_unreadable", revision=stored.revision, reason=short_reason(error))
            return
        log.info("tenant_policies_read", revision=stored.revision, tenants=len(self.newest.tenants))
