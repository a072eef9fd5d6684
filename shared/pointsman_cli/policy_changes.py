"""Tenant policies in one line: what a change of them changed, or what they set. In: policies. Out: words."""

from collections.abc import Iterator

from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman_cli.formatting import plural

NAMED_MAX = 5
CHARACTERS_MAX = 64
"""Of a name; tenants have up to 256, cache groups 1,024."""
NO_CHANGE = "no policy"


def changes(before: TenantPolicies | None, after: TenantPolicies) -> str:
    """`before` None: no policies were set."""
    known = before or TenantPolicies()
    found = list(_changes(known, after))
    more = [f"{len(found) - NAMED_MAX:,} more"] if len(found) > NAMED_MAX else []
    return "; ".join(found[:NAMED_MAX] + more) or NO_CHANGE


def policies_set(policies: TenantPolicies) -> str:
    """For a reader who does not know the policies before."""
    default = _difference(TenantPolicy(), policies.default, with_old=False) or "no limits"
    return f"default ({default}) and {plural(len(policies.tenants), 'tenant')}"


def _changes(before: TenantPolicies, after: TenantPolicies) -> Iterator[str]:
    if before.default != after.default:
        yield f"default ({_difference(before.default, after.default)})"
    if before.cached_token_weight != after.cached_token_weight:
        yield f"cached_token_weight {_shown(before.cached_token_weight)} -> {_shown(after.cached_token_weight)}"
    for name in sorted(before.tenants.keys() | after.tenants.keys()):
        old, new = before.of(name), after.of(name)
        difference = _difference(old, new)
        if name not in after.tenants:
            yield f"{_cut(name)} (removed)"
        elif name not in before.tenants:
            yield f"{_cut(name)} (added{f': {difference}' if difference else ''})"
        elif difference:
            yield f"{_cut(name)} ({difference})"


def _difference(old: TenantPolicy, new: TenantPolicy, *, with_old: bool = True) -> str:
    differing = [key for key in TenantPolicy.__struct_fields__ if getattr(old, key) != getattr(new, key)]
    return ", ".join(
        f"{key} {f'{_shown(getattr(old, key))} -> ' if with_old else ''}{_shown(getattr(new, key))}"
        for key in differing
    )


def _shown(value: float | str) -> str:
    return _cut(value) or "-" if isinstance(value, str) else f"{value:,.10g}"


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS_MAX else f"{text[: CHARACTERS_MAX - 3]}..."
