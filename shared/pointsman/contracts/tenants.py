"""Limits and priorities of tenants. Fields: docs/events.md. Written by the leader on `pm.<pool>.access`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.envelope import Event
from pointsman.primitives import Count, EngineSeconds, Name, Tenant

Priority = Literal["batch", "standard", "interactive"]

Rate = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight = Annotated[float, Meta(ge=1e-3, le=1e3)]
TENANTS_MAX = 10_000


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one tenant in one pool; 0: unlimited. Tokens: uncached prompt tokens and output tokens count 1, cached
    ones `cached_token_weight`. `kv_share`: of the pool's KV capacity, in flight. `cache_group`: tenants of one group
    share cached prefixes; empty: a group of its own."""

    priority: Priority = "standard"
    weight: Weight = 1.0
    cache_group: Name = ""
    requests_per_second: Rate = 0.0
    concurrency: Count = 0
    tokens_per_minute: Count = 0
    tokens_per_day: Count = 0
    kv_share: Share = 0.0


class TenantPolicies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    default: TenantPolicy = TenantPolicy()
    tenants: Annotated[dict[Tenant, TenantPolicy], Meta(max_length=TENANTS_MAX)] = {}
    cached_token_weight: Share = 0.0

    def of(self, tenant: Tenant) -> TenantPolicy:
        return self.tenants.get(tenant, self.default)


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`reset`: engine seconds until nothing of it is used."""

    limit: Count
    remaining: Count
    reset: EngineSeconds


class RateLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of the request's tenant after this request; None: unlimited."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None


class TenantPoliciesSet(Event, frozen=True, kw_only=True):
    """These policies hold from here on. A decision of the leader. `by`: the operator."""

    policies: TenantPolicies
    by: Name = ""
