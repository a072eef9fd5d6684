"""The tenants file of operators: TOML with `cached_token_weight`, `[default]` and `[tenants.NAME]`, whose keys are the
fields of `TenantPolicy`. A tenant has the default's value for each key that its table leaves out.

The file replaces all policies, and one that is being written is empty for a moment. So a file without any policy must say
`[tenants]`."""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from pointsman.contracts.tenants import TENANTS_MAX, TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant

STANDARD_INPUT = Path("-")
DEFAULT = "default"
RATE_MIN = 1e-6  # a request in eleven days
TENANT_LENGTH_MAX = 128  # of names that an ingress passes on
FIELDS = tuple(TenantPolicy.__struct_fields__)
_TYPES = get_type_hints(TenantPolicy, include_extras=True)
_CACHED_TOKEN_WEIGHT = "cached_token_weight"
_TENANTS = "tenants"
T = TypeVar("T")


class TenantsFileError(ValueError):
    """The message names table and key."""


def read_tenant_policies(path: Path) -> TenantPolicies:
    """STANDARD_INPUT too. Raises TenantsFileError."""
    place = "standard input" if path == STANDARD_INPUT else path
    try:
        return parse_tenant_policies(sys.stdin.read() if path == STANDARD_INPUT else path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TenantsFileError(f"cannot read {place}: {reason}") from error
    except TenantsFileError as error:
        raise TenantsFileError(f"{place}: {error}") from error


def parse_tenant_policies(text: str) -> TenantPolicies:
    """Raises TenantsFileError."""
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TenantsFileError(f"not TOML: {error}") from error
    _check_keys(tables, (_CACHED_TOKEN_WEIGHT, DEFAULT, _TENANTS), "the file")
    if not tables.get(DEFAULT) and _TENANTS not in tables:
        raise TenantsFileError("it sets no policy; one that removes all limits says [tenants]")
    default = changed_policy(TenantPolicy(), _table(tables, DEFAULT, DEFAULT), DEFAULT)
    named = _table(tables, _TENANTS, _TENANTS)
    if len(named) > TENANTS_MAX:
        raise TenantsFileError(f"[tenants] names {len(named)} tenants; at most {TENANTS_MAX}")
    return TenantPolicies(
        default=default,
        tenants={
            tenant_name(name): changed_policy(default, _table(named, name, f"{_TENANTS}.{name}"), f"{_TENANTS}.{name}")
            for name in named
        },
        cached_token_weight=_weight(tables),
    )


def changed_policy(
    policy: TenantPolicy, values: Mapping[str, Any], table: str, *, from_text: bool = False
) -> TenantPolicy:
    """`policy` with these values; `table` names them in messages. `from_text`: numbers are text. Raises
    TenantsFileError."""
    _check_keys(values, FIELDS, f"[{table}]")
    checked = {
        name: _checked(value, _TYPES[name], f"[{table}] {name}", strict=not from_text) for name, value in values.items()
    }
    if 0 < checked.get("requests_per_second", 0.0) < RATE_MIN:
        raise TenantsFileError(
            f"[{table}] requests_per_second = {checked['requests_per_second']!r}: less than {RATE_MIN:g}; 0 is unlimited"
        )
    return msgspec.structs.replace(policy, **checked)


def with_changes(policies: TenantPolicies, texts: Iterable[str]) -> TenantPolicies:
    """Each text is `NAME.KEY=VALUE`; the name `default` changes tenants without a table. Raises TenantsFileError."""
    default, named = policies.default, dict(policies.tenants)
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, key = place.rpartition(".")
        if not (name and dot and key and equals):
            raise TenantsFileError(f"'{text}' is not NAME.KEY=VALUE")
        if name == DEFAULT:
            default = changed_policy(default, {key: value}, DEFAULT, from_text=True)
        else:
            tenant = tenant_name(name)
            known = named.get(tenant, default)
            named[tenant] = changed_policy(known, {key: value}, f"{_TENANTS}.{name}", from_text=True)
    return msgspec.structs.replace(policies, default=default, tenants=named)


def tenant_name(name: str) -> Tenant:
    """Raises TenantsFileError for a name that no request can have."""
    plain = name.isascii() and name.isprintable() and name.strip() == name
    if not plain or not 0 < len(name) <= TENANT_LENGTH_MAX:
        raise TenantsFileError(f"[tenants.{name!r}]: a name has 1 to {TENANT_LENGTH_MAX} printable ASCII characters")
    if name == DEFAULT:
        raise TenantsFileError("[tenants.default]: the policy of tenants without a table is [default]")
    return Tenant(name)


def _weight(tables: Mapping[str, Any]) -> float:
    value = tables.get(_CACHED_TOKEN_WEIGHT, 0.0)
    hints = get_type_hints(TenantPolicies, include_extras=True)
    return float(_checked(value, hints[_CACHED_TOKEN_WEIGHT], _CACHED_TOKEN_WEIGHT))


def _table(tables: Mapping[str, Any], name: str, shown: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise TenantsFileError(f"{shown} is a table: write [{shown}]")
    return table


def _checked(value: Any, kind: type[T], place: str, *, strict: bool = True) -> T:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        expected = f"expected one of {', '.join(choices)}" if choices else str(error)
        raise TenantsFileError(f"{place} = {value!r}: {expected[:1].lower()}{expected[1:]}") from error


def _check_keys(values: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for name in values:
        if name not in known:
            raise TenantsFileError(f"{place} has no key {name!r}; there are: {', '.join(known)}")
