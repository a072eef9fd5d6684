"""Which pending requests wait until their tenant has less in flight, since it has a share of the KV capacity (`Tenants`).
Functions over `StateParts`."""

from collections.abc import Callable

from pointsman.primitives import EngineSeconds, Tenant
from pointsman.state import fold_versions
from pointsman.state.parts import StateParts
from pointsman.state.priority_classes import QueueClass
from pointsman.state.workload import Request


def waiters(parts: StateParts) -> Callable[[Request], bool]:
    """Tells of a request, as State is now, whether it has to wait until its tenant has less in flight, or behind one of its
    tenant that goes before it and has to. What is the same for all of a tenant and class is looked up once."""
    tenants, capacity = parts.tenants, parts.fleet.kv_capacity_tokens
    known: dict[tuple[Tenant, QueueClass], bool | None] = {}

    def waits(request: Request) -> bool:
        of = request.tenant, request.queue_class
        if of not in known:
            has_share = tenants.policy_of(request.tenant).kv_share > 0
            known[of] = _first_waits(parts, *of) if has_share else None
        first_waits = known[of]
        return first_waits is not None and (first_waits or tenants.must_wait_for_kv(request, capacity))

    return waits if tenants.limits_kv else _never


def may_be_free(parts: StateParts) -> bool:
    """Whether a pending request of a tenant with a share may go for all that its share says."""
    tenants = parts.tenants
    return tenants.limits_kv and any(
        tenants.policy_of(tenant).kv_share > 0 and not _first_waits(parts, tenant, name)
        for name, pending in parts.pending.classes.items()
        for tenant in pending
    )


def best_effort_turn(parts: StateParts, now: EngineSeconds) -> tuple[Request, EngineSeconds] | None:
    """See `BestEffort.turn`."""
    skips = parts.tenants.limits_kv and parts.settings.fold_version >= fold_versions.KV_ORDER
    return parts.best_effort.turn(now, waiters(parts) if skips else None)


def _first_waits(parts: StateParts, tenant: Tenant, queue_class: QueueClass) -> bool:
    """One of those that go before all others of the tenant in this class: they wait behind it."""
    if parts.settings.fold_version < fold_versions.KV_ORDER:
        return False
    capacity = parts.fleet.kv_capacity_tokens
    return any(parts.tenants.must_wait_for_kv(first, capacity) for first in parts.pending.oldest(tenant, queue_class))


def _never(_request: Request) -> bool:
    return False
