"""The limits of tenants that a what-if changes: its settings `tenants.NAME.KEY=VALUE`."""

from collections.abc import Callable, Sequence

from pointsman.adapters.tenants_file import with_changes
from pointsman.analysis.what_if import TENANTS_PREFIX
from pointsman.contracts.tenants import TenantPolicies


def limits_of(settings: Sequence[str]) -> Callable[[TenantPolicies], TenantPolicies] | None:
    """None if no setting is of a tenant."""
    texts = [text.removeprefix(TENANTS_PREFIX) for text in settings if text.startswith(TENANTS_PREFIX)]
    return (lambda policies: with_changes(policies, texts)) if texts else None
