"""The tenants file: what it means, and what it says of mistakes."""

import io
from pathlib import Path

import pytest

from pointsman.adapters.tenants_file import (
    STANDARD_INPUT,
    TenantsFileError,
    changed_policy,
    parse_tenant_policies,
    read_tenant_policies,
)
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant

FILE = """
cached_token_weight = 0.1
[default]
requests_per_second = 5
concurrency = 3
[tenants.alice]
priority = "interactive"
tokens_per_minute = 200_000
[tenants."team b"]
requests_per_second = 0
"""


def test_a_tenant_has_the_defaults_values_where_its_table_has_none() -> None:
    policies = parse_tenant_policies(FILE)

    assert policies == TenantPolicies(
        default=TenantPolicy(requests_per_second=5.0, concurrency=3),
        tenants={
            Tenant("alice"): TenantPolicy(
                priority="interactive", requests_per_second=5.0, concurrency=3, tokens_per_minute=200_000
            ),
            Tenant("team b"): TenantPolicy(concurrency=3),
        },
        cached_token_weight=0.1,
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# limits", "[default]", "cached_token_weight = 0.1"])
def test_a_file_that_was_cut_short_lifts_no_limits(text: str) -> None:
    with pytest.raises(TenantsFileError, match=r"sets no policy; one that removes all limits says \[tenants\]"):
        parse_tenant_policies(text)


@pytest.mark.parametrize("text", ["[tenants]", "tenants = {}", "[default]\n[tenants]"])
def test_all_limits_are_removed_by_a_file_that_says_so(text: str) -> None:
    assert parse_tenant_policies(text) == TenantPolicies()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default", "not TOML"),
        ("rate = 1", "the file has no key 'rate'"),
        ("[default]\nconcurency = 1", r"\[default\] has no key 'concurency'; there are: priority, weight,"),
        ("[tenants.a]\nconcurrency = -1", r"\[tenants.a\] concurrency = -1: expected `int` >= 0"),
        ("[tenants.a]\nconcurrency = 1.5", r"\[tenants.a\] concurrency = 1.5: expected `int`"),
        ("[default]\nconcurrency = true", "expected `int`, got `bool`"),
        ('[default]\nrequests_per_second = "5"', "expected `float`, got `str`"),
        ("[default]\nrequests_per_second = nan", "requests_per_second = nan"),
        ("[default]\nrequests_per_second = inf", "requests_per_second = inf"),
        ("[default]\nrequests_per_second = 1e-300", "less than 1e-06; 0 is unlimited"),
        ("[default]\nweight = 0", "weight = 0"),
        ("[default]\nkv_share = 1.1", "kv_share = 1.1"),
        ('[tenants.a]\npriority = "high"', "priority = 'high': expected one of batch, standard, interactive"),
        ("cached_token_weight = 2\n[tenants]", "cached_token_weight = 2"),
        ("tenants = 1", r"write \[tenants\]"),
        ("[tenants]\na = 1", r"write \[tenants.a\]"),
        ("[tenants.default]", r"is \[default\]"),
        ('[tenants.""]', "printable ASCII"),
        ('[tenants."a\\u001b[2J"]', "printable ASCII"),
        (f"[tenants.{'a' * 129}]", "1 to 128"),
    ],
)
def test_a_mistake_is_named_with_its_table_and_key(text: str, message: str) -> None:
    with pytest.raises(TenantsFileError, match=message) as raised:
        parse_tenant_policies(text)

    assert str(raised.value).isprintable()


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    with pytest.raises(TenantsFileError, match=r"cannot read .*tenants\.toml: No such file"):
        read_tenant_policies(path)
    path.write_bytes(b"\xff")
    with pytest.raises(TenantsFileError, match=r"cannot read .*tenants\.toml"):
        read_tenant_policies(path)
    path.write_text("[default]\nspeed = 1")
    with pytest.raises(TenantsFileError, match=r"tenants\.toml: \[default\] has no key 'speed'"):
        read_tenant_policies(path)


def test_standard_input_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("[tenants.alice]\nconcurrency = 3"))

    assert read_tenant_policies(STANDARD_INPUT) == parse_tenant_policies("[tenants.alice]\nconcurrency = 3")


def test_values_given_as_text_are_read_like_those_of_a_file() -> None:
    values = {"priority": "batch", "requests_per_second": "2.5", "concurrency": "8"}

    assert changed_policy(TenantPolicy(weight=2.0), values, "a", from_text=True) == TenantPolicy(
        priority="batch", weight=2.0, requests_per_second=2.5, concurrency=8
    )
    with pytest.raises(TenantsFileError, match="concurrency = 'many'"):
        changed_policy(TenantPolicy(), {"concurrency": "many"}, "a", from_text=True)
