"""`pointsman tenants`: shows and sets limits, priorities and cache groups of tenants."""

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import click
from rich.table import Table

from pointsman.adapters.tenants_file import TenantsFileError, read_tenant_policies, with_changes
from pointsman.contracts.access import valid_tenant
from pointsman.contracts.commands import (
    DescribeTenants,
    SetTenantPolicies,
    TenantDescribed,
    TenantPoliciesAnswered,
    TenantsDescribed,
)
from pointsman.contracts.subjects import admin_subject, command_subject
from pointsman.contracts.tenants import RateLimit, RateLimits, TenantPolicies, TenantPolicy
from pointsman.ports import Commands
from pointsman.primitives import PoolName, Tenant
from pointsman.runtime.settings import FleetSettings
from pointsman.state.tenants import BURST_SECONDS, MINUTE, bucket_size
from pointsman_cli.command_client import ask, connected_link, no_scheduler
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.options import CONTEXT, as_given, fleet_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.policy_changes import changes
from pointsman_cli.terminal import output_console, print_line, say, table

T = TypeVar("T")


class PoliciesChange(NamedTuple):
    before: TenantPolicies
    after: TenantPolicies


_NOTHING = TenantDescribed(tenant=Tenant(""))


@click.group("tenants", context_settings=CONTEXT)
def tenants_command() -> None:
    """Show and set the limits, priorities and cache groups of tenants.

    They hold for every pool of the deployment, each of which counts by itself, from a second after the change on.

    \b
      pointsman tenants apply tenants.toml
      pointsman tenants set alice requests_per_second=20 priority=interactive
      pointsman tenants set default concurrency=8        tenants without a policy of their own
      pointsman tenants show
    """


@tenants_command.command("show", context_settings=CONTEXT)
@fleet_options
@json_switch
def show_command(place: str | None, pool: str | None, as_json: bool) -> None:
    """Show the policies in force, and what each tenant has used of its limits."""
    described = _run(place, pool, _described, acts=False)
    print_json(described) if as_json else show(described)


@tenants_command.command("apply", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@fleet_options
@json_switch
def apply_command(file: Path, place: str | None, pool: str | None, as_json: bool) -> None:
    """Replace all policies by those of FILE (TOML); `-`: standard input.

    \b
      cached_token_weight = 0.1          of a cached prompt token; others count 1
      [default]                          tenants without a table; its values hold where a table has none
      requests_per_second = 5
      [tenants.alice]
      priority = "interactive"           batch, standard or interactive
      tokens_per_minute = 200_000

    The keys of a table: priority, weight, cache_group, requests_per_second, concurrency, tokens_per_minute,
    tokens_per_day, kv_share. 0: unlimited. A file that removes all limits says [tenants].
    """
    policies = _checked(lambda: read_tenant_policies(file))

    report(_run(place, pool, replacing(lambda _known: policies, whatever_was=True)), as_json=as_json)


@tenants_command.command("set", context_settings=CONTEXT)
@click.argument("tenant")
@click.argument("values", nargs=-1, required=True, metavar="KEY=VALUE...")
@fleet_options
@json_switch
def set_command(tenant: str, values: tuple[str, ...], place: str | None, pool: str | None, as_json: bool) -> None:
    """Change the policy of TENANT; `default` is that of tenants without one of their own.

    A tenant without a policy of its own gets one: the default's, with these values. Later changes of the default leave
    it alone.
    """
    texts = [f"{tenant}.{value}" for value in values]
    _checked(lambda: with_changes(TenantPolicies(), texts))  # before anything is asked

    report(_run(place, pool, replacing(lambda known: with_changes(known, texts))), as_json=as_json)


def _run(
    place: str | None,
    pool: str | None,
    ask_leader: Callable[[Commands, FleetSettings], Awaitable[T]],
    *,
    acts: bool = True,
) -> T:
    settings = fleet_settings(place, pool, acts=acts)

    async def connected() -> T:
        async with connected_link(settings, name="tenants") as link:
            return await ask_leader(link.commands, settings)

    return run_command(connected())


def replacing(
    change: Callable[[TenantPolicies], TenantPolicies], *, whatever_was: bool = False
) -> Callable[[Commands, FleetSettings], Awaitable[PoliciesChange]]:
    async def replace(commands: Commands, settings: FleetSettings) -> PoliciesChange:
        described = await _described(commands, settings)
        before = described.policies or TenantPolicies()
        after = change(before)
        await replace_policies(commands, settings, after, revision=None if whatever_was else described.revision)
        return PoliciesChange(before, after)

    return replace


async def _described(commands: Commands, settings: FleetSettings) -> TenantsDescribed:
    subject = command_subject(PoolName(settings.pool), "fleet")
    return await ask(commands, subject, DescribeTenants(), TenantsDescribed, absent=no_scheduler(settings))


async def replace_policies(
    commands: Commands, settings: FleetSettings, policies: TenantPolicies, *, revision: int | None = None
) -> None:
    """`revision`: those that they are made from. Raises click.ClickException, too if there are later ones."""
    subject = admin_subject(PoolName(settings.pool), "tenants", settings.actor)
    command = SetTenantPolicies(policies=policies, revision=revision)
    answer = await ask(commands, subject, command, TenantPoliciesAnswered, absent=no_scheduler(settings))
    if answer.refusal:
        raise click.ClickException(answer.refusal)


def _checked(read: Callable[[], T]) -> T:
    try:
        return read()
    except TenantsFileError as error:
        raise click.UsageError(str(error)) from error


def report(change: PoliciesChange, *, as_json: bool) -> None:
    if as_json:
        print_json(change.after)
    else:
        for name in sorted(change.after.tenants.keys() - change.before.tenants.keys()):
            if not valid_tenant(name):
                print_line(
                    f"no key or token can name the tenant {name!r}: only clients without one have such a name",
                    error=True,
                )
        print_line(f"changed: {changes(change.before, change.after)}; look with: pointsman tenants show{as_given()}")


def show(described: TenantsDescribed) -> None:
    console, policies = output_console(), described.policies
    if policies is None:
        say(console, "no policies were set: no tenant has limits, all are 'standard'")
        return
    use = {tenant.tenant: tenant for tenant in described.tenants}
    shown = _table(f"tenants of the pool {described.pool}")
    _add_row(shown, "default", policies.default, None)
    for name in sorted(policies.tenants):
        _add_row(shown, name, policies.tenants[name], use.get(name, _NOTHING))
    for name, tenant in use.items():
        if name not in policies.tenants:
            _add_row(shown, f"{name} (default)", policies.default, tenant)
    console.print(shown)
    say(console, f"a cached prompt token counts {policies.cached_token_weight:g}; used, or left now / limit, -: none")
    say(console, f"left now: at most what {BURST_SECONDS:g} s bring, and one more")


def _table(title: str) -> Table:
    columns = ("tenant", "priority", ">weight", "group", ">left now / requests per s", ">concurrency")
    return table(*columns, ">left now / tokens per min", ">tokens today", ">KV share", title=title)


def _add_row(shown: Table, name: str, policy: TenantPolicy, use: TenantDescribed | None) -> None:
    """`use`: None for the default, which no tenant's use counts against."""
    limits = (use.limits if use else None) or RateLimits()
    shown.add_row(
        name,
        policy.priority,
        f"{policy.weight:g}",
        policy.cache_group,
        _of(_left(limits.requests, policy.requests_per_second) if use else None, policy.requests_per_second),
        _of(use.in_flight if use else None, policy.concurrency),
        _of(_left(limits.tokens, policy.tokens_per_minute / MINUTE) if use else None, policy.tokens_per_minute),
        _of(use.tokens_today if use else None, policy.tokens_per_day),
        _limit(policy.kv_share),
    )


def _left(limit: RateLimit | None, rate: float) -> float | None:
    """Of a limit of `rate` a second. None: unlimited. Without a `limit` nothing was used."""
    if not rate:
        return None
    return limit.remaining if limit is not None else math.floor(bucket_size(rate))


def _of(part: float | None, limit: float) -> str:
    return f"{'-' if part is None else _number(part)} / {_limit(limit)}"


def _limit(value: float) -> str:
    return _number(value) if value else "-"


def _number(value: float) -> str:
    return f"{value:,.10g}"
