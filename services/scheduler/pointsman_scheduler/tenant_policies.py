"""Tenant policies between the key-value store, which all pools share, and this pool's log. In: the stored document,
operators' commands. Out: TenantPoliciesSet whenever the document differs from what State has: at the start of a term
and after a change, which may come through another pool's leader."""

import asyncio
from itertools import chain

import msgspec

from pointsman.contracts.commands import (
    SetTenantPolicies,
    TenantDescribed,
    TenantPoliciesAnswered,
    TenantsDescribed,
)
from pointsman.contracts.subjects import actor_of
from pointsman.contracts.tenants import TenantPolicies
from pointsman.ports import Clock, KeyValueStore, Reply, StoredValue, StoreUnavailableError, ValueChangedError
from pointsman.primitives import EngineSeconds, PoolName
from pointsman.runtime.admin_log import log_admin_action
from pointsman.runtime.containment import contained
from pointsman.runtime.tenant_policies import TENANTS_KEY, FollowedPolicies
from pointsman.state.state import State
from pointsman_scheduler.leader import ActiveTerm, Candidacy
from pointsman_scheduler.replica import Replica

TENANTS_DESCRIBED_MAX = 1_000
CHANGED_MEANWHILE = (
    "somebody else has changed the policies since they were read, and nothing of yours was set; "
    "look at them with: pointsman tenants show, then try again"
)


class TenantPoliciesKeeper:
    def __init__(self, *, leader: Candidacy, replica: Replica, store: KeyValueStore, clock: Clock) -> None:
        self._leader = leader
        self._replica = replica
        self._store = store
        self._clock = clock
        self._followed = FollowedPolicies(store)
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Runs without end."""
        async for read in self._store.follow(TENANTS_KEY):
            async with self._writing:  # what was read before a write must not follow it into the log
                self._followed.take(read)
            with contained("tenant policies"):
                await self.enforce()

    async def enforce(self, *, by: str = "") -> None:
        term, newest = self._leader.leading, self._followed.newest
        if term is not None and newest is not None and newest != self._replica.state.tenants.policies:
            term.dispatcher.set_tenant_policies(newest, self._clock.now(), by=by)
            await term.publish()

    async def change(self, _term: ActiveTerm, command: SetTenantPolicies, reply: Reply) -> None:
        by = actor_of(reply.subject)
        async with self._writing:
            refusal = await self._write(command)
            log_admin_action("tenants", by, refusal, tenants=len(command.policies.tenants))
            await self.enforce(by="" if refusal else by)
        await reply(TenantPoliciesAnswered(refusal=refusal))

    async def _write(self, command: SetTenantPolicies) -> str:
        """Returns why it was not written, or may not have been; empty if it was."""
        document = msgspec.json.encode(command.policies)
        try:
            stored = await self._store.get(TENANTS_KEY)
            found = stored.revision if stored else 0
            if command.revision not in (None, found):
                self._followed.note(stored)  # who looks now sees it
                return CHANGED_MEANWHILE
            revision = await self._store.put(TENANTS_KEY, document, after=found)
        except ValueChangedError:
            return CHANGED_MEANWHILE
        except StoreUnavailableError as error:
            return f"the store of policies does not answer ({error}); it may have been stored: 'pointsman tenants show' tells"
        self._followed.note(StoredValue(TENANTS_KEY, document, revision))
        return ""

    def described(self, pool: PoolName) -> TenantsDescribed:
        """The stored policies, with their revision: they are in force at once, or as soon as `enforce` has run."""
        state, now = self._replica.state, self._clock.now()
        policies, revision = self._followed.newest or state.tenants.policies, self._followed.revision
        tenants = _described(state, policies, now) if policies is not None else []
        return TenantsDescribed(pool=pool, policies=policies, tenants=tenants, revision=revision)


def _described(state: State, policies: TenantPolicies, now: EngineSeconds) -> list[TenantDescribed]:
    accounts = sorted(
        chain(state.tenants.named.items(), state.tenants.unnamed.items()),
        key=lambda item: (-item[1].in_flight, item[0]),
    )
    return [
        TenantDescribed(
            tenant=tenant,
            in_flight=account.in_flight,
            tokens_today=round(account.used_on(now)),
            limits=account.rate_limits(policies.of(tenant), now),
        )
        for tenant, account in accounts[:TENANTS_DESCRIBED_MAX]
    ]
