"""`pointsman tenants`: how a change is made, and what is shown."""

import click
import pytest
from click.testing import CliRunner

from pointsman.adapters.tenants_file import TenantsFileError, with_changes
from pointsman.contracts.commands import TenantDescribed, TenantsDescribed
from pointsman.contracts.tenants import RateLimit, RateLimits, TenantPolicies, TenantPolicy
from pointsman.primitives import Tenant
from pointsman_cli.policy_changes import changes, policies_set
from pointsman_cli.tenants import PoliciesChange, report, show, tenants_command

ALICE = Tenant("alice")
KNOWN = TenantPolicies(
    default=TenantPolicy(concurrency=3), tenants={ALICE: TenantPolicy(tokens_per_minute=60_000, priority="interactive")}
)


def test_a_change_keeps_what_it_does_not_name() -> None:
    changed = with_changes(KNOWN, ["alice.requests_per_second=2.5"])

    assert changed.default == KNOWN.default
    assert changed.tenants == {
        ALICE: TenantPolicy(tokens_per_minute=60_000, priority="interactive", requests_per_second=2.5)
    }


def test_a_new_tenant_begins_with_the_default_and_the_default_has_a_name() -> None:
    changed = with_changes(KNOWN, ["bob.priority=batch", "default.concurrency=0"])

    assert changed.tenants[Tenant("bob")] == TenantPolicy(concurrency=3, priority="batch")
    assert changed.default == TenantPolicy()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "alice"], "Missing argument"),
        (["set", "alice", "concurrency"], "'alice.concurrency' is not NAME.KEY=VALUE"),
        (["set", "alice", "concurrency=-1"], "concurrency = '-1'"),
        (["set", "alice", "speed=1"], "has no key 'speed'"),
        (["set", "a\x1b[2J", "concurrency=1"], "printable ASCII"),
        (["apply", "/no/such/file.toml"], "cannot read /no/such/file.toml: No such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(words: list[str], message: str) -> None:
    result = CliRunner().invoke(tenants_command, words)

    assert result.exit_code == 2
    assert message in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[default]\nspeed = 1", "standard input: [default] has no key 'speed'"),
        ("", "standard input: it sets no policy"),
    ],
)
def test_a_file_may_come_by_standard_input_where_there_is_no_place_for_one(given: str, message: str) -> None:
    result = CliRunner().invoke(tenants_command, ["apply", "-"], input=given)

    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["default.concurrency=8"], "default (concurrency 3 -> 8)"),
        (["default.concurrency=3"], "no policy"),
        (["alice.tokens_per_minute=0"], "alice (tokens_per_minute 60,000 -> 0)"),
        (["bob.cache_group=g"], "bob (added: cache_group - -> g)"),
        (["bob.concurrency=3"], "bob (added)"),
        ([f"t{n}.weight=2" for n in range(7)], "2 more"),
    ],
)
def test_a_change_is_told_by_what_differs_from_before(texts: list[str], words: str) -> None:
    told = changes(KNOWN, with_changes(KNOWN, texts))

    assert told.endswith(words)
    assert told.count(";") <= 5


def test_policies_that_replace_others_tell_also_what_is_gone() -> None:
    after = TenantPolicies(cached_token_weight=0.1)

    assert changes(KNOWN, after) == "default (concurrency 3 -> 0); cached_token_weight 0 -> 0.1; alice (removed)"
    assert changes(None, TenantPolicies(default=TenantPolicy(weight=2.0))) == "default (weight 1 -> 2)"


def test_long_names_in_a_change_are_cut() -> None:
    policy = TenantPolicy(cache_group="g" * 1024)
    told = changes(None, TenantPolicies(default=policy, tenants={Tenant("t" * 256): policy}))

    assert "ttt..." in told
    assert "ggg..." in told
    assert len(told) < 300


@pytest.mark.parametrize(("name", "told"), [("a b", True), ("alice", False), ("team/a@b", False)])
def test_a_name_that_no_key_can_have_is_told(name: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = TenantPolicies()
    report(PoliciesChange(before, with_changes(before, [f"{name}.concurrency=1"])), as_json=False)

    assert ("no key or token can name the tenant 'a b'" in capsys.readouterr().err) == told


def test_a_reader_of_one_event_is_told_what_it_sets() -> None:
    assert policies_set(KNOWN) == "default (concurrency 3) and 1 tenant"
    assert policies_set(TenantPolicies()) == "default (no limits) and 0 tenants"


def test_an_impossible_name_is_refused() -> None:
    with pytest.raises(TenantsFileError):
        with_changes(KNOWN, ["a b\x00.concurrency=1"])


def test_policies_are_shown_with_what_is_used_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    limits = RateLimits(tokens=RateLimit(limit=60_000, remaining=41_200, reset=18.8))
    show(
        TenantsDescribed(
            pool="default",
            policies=KNOWN,
            tenants=[
                TenantDescribed(tenant=ALICE, in_flight=2, tokens_today=1_234_567, limits=limits),
                TenantDescribed(tenant=Tenant("some\x1bbody"), in_flight=1),
            ],
        )
    )

    lines = capsys.readouterr().out.splitlines()
    somebody = next(line for line in lines if "body (default)" in line)
    assert row_of("alice", lines) == "alice interactive 1 - / - 2 / - 41,200 / 60,000 1,234,567 / - -"
    assert "1 / 3" in somebody
    assert "\x1b" not in somebody


def test_what_is_left_has_the_same_form_before_and_after_the_first_request(capsys: pytest.CaptureFixture[str]) -> None:
    names = [Tenant(name) for name in ("new", "all-left", "at-work")]
    policy = TenantPolicy(requests_per_second=2.5, concurrency=4, tokens_per_minute=60_000, tokens_per_day=900_000)
    untouched = RateLimits(
        requests=RateLimit(limit=3, remaining=2, reset=0.0), tokens=RateLimit(limit=60_000, remaining=501, reset=0.0)
    )
    used = RateLimits(
        requests=RateLimit(limit=3, remaining=1, reset=1.0), tokens=RateLimit(limit=60_000, remaining=7, reset=9.0)
    )
    show(
        TenantsDescribed(
            pool="default",
            policies=TenantPolicies(default=policy, tenants=dict.fromkeys(names, policy)),
            tenants=[
                TenantDescribed(tenant=names[1], limits=untouched),
                TenantDescribed(tenant=names[2], in_flight=1, tokens_today=50, limits=used),
            ],
        )
    )

    lines = capsys.readouterr().out.splitlines()
    nothing_used = "standard 1 2 / 2.5 0 / 4 501 / 60,000 0 / 900,000 -"
    assert row_of("new", lines) == f"new {nothing_used}"
    assert row_of("all-left", lines) == f"all-left {nothing_used}"
    assert row_of("at-work", lines) == "at-work standard 1 1 / 2.5 1 / 4 7 / 60,000 50 / 900,000 -"
    assert row_of("default", lines) == "default standard 1 - / 2.5 - / 4 - / 60,000 - / 900,000 -"


def row_of(name: str, lines: list[str]) -> str:
    return " ".join(next(line for line in lines if line.split()[:1] == [name]).split())


def test_without_policies_it_says_what_that_means(capsys: pytest.CaptureFixture[str]) -> None:
    show(TenantsDescribed(pool="default"))

    assert "no tenant has limits" in capsys.readouterr().out


def test_every_command_has_help_and_json() -> None:
    assert isinstance(tenants_command, click.Group)
    for name in ("show", "apply", "set"):
        assert "--json" in CliRunner().invoke(tenants_command, [name, "--help"]).output
