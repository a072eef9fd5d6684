"""Tenants with limits, for the seeds that have them: who sends, and which policies an operator sets at the beginning and
during the faults. No share of the KV capacity and no priorities: `decision_rules` expects one class."""

import asyncio
from random import Random

import msgspec

from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.ports import StoreUnavailableError, ValueChangedError
from pointsman.primitives import Tenant
from pointsman.runtime.tenant_policies import TENANTS_KEY
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.plan import FAULTS_BEGIN, TENANTS

CHANGES = 3
RETRY_SECONDS = 1.0
RETRIES_MAX = 30


def drawn_policies(chance: Random, speed: float) -> TenantPolicies:
    """A few requests of each tenant are over a limit."""

    def policy() -> TenantPolicy:
        return TenantPolicy(
            weight=chance.choice((1.0, 1.0, 3.0)),
            requests_per_second=chance.choice((0.0, 0.5, 2.0)) / speed,
            concurrency=chance.choice((0, 0, 1, 3)),
            tokens_per_minute=round(chance.choice((0, 0, 10_000, 40_000)) / speed),
            tokens_per_day=chance.choice((0, 0, 6_000)),
        )

    named = {Tenant(name): policy() for name in TENANTS if chance.random() < 0.8}
    return TenantPolicies(tenants=named, cached_token_weight=chance.choice((0.0, 0.25)))


async def set_policies(environment: Environment) -> None:
    """At the beginning, and again at times within the faults."""
    plan, chance = environment.plan, Random(f"policies {environment.plan.seed}")
    for change in range(CHANGES):
        policies = drawn_policies(chance, plan.speed)
        for _ in range(RETRIES_MAX):
            if await _put(environment, policies):
                break
            await asyncio.sleep(RETRY_SECONDS)
        environment.note(f"tenant policies {change + 1}")
        await asyncio.sleep(FAULTS_BEGIN if not change else chance.random() * plan.fault_seconds / CHANGES)


async def _put(environment: Environment, policies: TenantPolicies) -> bool:
    store = environment.network.broker.access
    try:
        known = await store.get(TENANTS_KEY)
        await store.put(TENANTS_KEY, msgspec.json.encode(policies), after=known.revision if known else 0)
    except (StoreUnavailableError, ValueChangedError):
        return False
    return True
