"""`pointsman keys`: creates, lists, rotates and revokes API keys. A key is made here and shown once; only its digest
leaves this process."""

import re
import secrets
import string
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import msgspec
from rich.table import Table
from typing_extensions import override

from pointsman.contracts.access import KEY_NAMES, ApiKey, KeyAction, decode_key, key_hash, name_of_key, secret_proof
from pointsman.contracts.commands import ApiKeyAnswered, ChangeApiKey
from pointsman.contracts.subjects import admin_subject
from pointsman.ports import KeyValueStore, Link, StoreUnavailableError
from pointsman.primitives import PoolName, Tenant
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import NoAnswerError, ask, connected_link, no_scheduler
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.options import CONTEXT, as_given, fleet_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import UNIX_SECONDS_MAX, output_console, print_line, table

KEY_CHARACTERS = string.ascii_letters + string.digits
RANDOM_LENGTH = 40  # 238 bits
ID_CHARACTERS = string.ascii_lowercase + string.digits
ID_LENGTH = 10
SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

T = TypeVar("T")


class Duration(click.ParamType[float]):
    name = "duration"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d{1,6})([smhd])", str(value))
        if found is None:
            self.fail(f"{value} is no duration such as 30m, 12h or 90d", param, ctx)
        return float(found[1]) * SECONDS_OF[found[2]]


@click.group("keys", context_settings=CONTEXT)
def keys_group() -> None:
    """Create, list, rotate and revoke API keys of clients. Changes reach all ingresses within seconds.

    \b
      pointsman keys create alice --expires 90d
      pointsman keys create batch-job --model 'llama-*' --endpoint /v1/chat/completions
      pointsman keys list
      pointsman keys rotate 3k9x2m7qpa --grace 1h     a successor; the old key stays valid for an hour
      pointsman keys revoke 3k9x2m7qpa                at once

    Ingresses ask for keys if they run with --require-keys (pointsman up --set ingress.require_keys=true).
    """


@keys_group.command("create", context_settings=CONTEXT)
@click.argument("tenant")
@click.option(
    "--expires", type=Duration(), metavar="DURATION", help="How long it is valid, as 12h or 90d. Default: forever."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="PATTERN",
    help="Model that it may use; may have * and ?. Repeatable. Default: all.",
)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="PATH",
    help="Path that it may use, as /v1/embeddings. Repeatable. Default: all.",
)
@fleet_options
@json_switch
def create_command(
    tenant: str,
    expires: float | None,
    models: tuple[str, ...],
    endpoints: tuple[str, ...],
    place: str | None,
    pool: str | None,
    as_json: bool,
) -> None:
    """Create a key of TENANT. It is printed once and cannot be shown again."""
    settings = fleet_settings(place, pool, acts=True)
    key, made = _new_key(
        settings, Tenant(tenant), models=list(models), endpoints=list(endpoints), expires_at=_moment_in(expires)
    )
    _run(settings, lambda link: _change(link, settings, "create", made))
    _show_new(key, made, as_json=as_json)


@keys_group.command("list", context_settings=CONTEXT)
@click.option("--tenant", help="Only keys of this tenant.")
@click.option("--all", "everything", is_flag=True, help="Also expired and revoked keys.")
@fleet_options
@json_switch
def list_command(tenant: str | None, everything: bool, place: str | None, pool: str | None, as_json: bool) -> None:
    """List keys: who has them, who made them, and what they may be used for."""
    settings = fleet_settings(place, pool, acts=True)
    found = _run(settings, lambda link: _stored_keys(link.access))
    shown = [
        key
        for key in sorted(found, key=lambda key: (key.tenant, key.created_at))
        if tenant in (None, key.tenant) and (everything or _status(key) == "active")
    ]
    if as_json:
        print_json({"keys": [_described(key) for key in shown]})
        return
    output_console().print(
        keys_table(shown) if shown else f"no keys; create one with: pointsman keys create{as_given()} TENANT"
    )


def keys_table(keys: Sequence[ApiKey]) -> Table:
    listed = table("key", "tenant", "created", "by", "expires", "models", "endpoints", "status")
    for key in keys:
        listed.add_row(
            _prefix(key),
            key.tenant,
            _day(key.created_at),
            key.created_by,
            _day(key.expires_at) or "never",
            " ".join(key.models) or "all",
            " ".join(key.endpoints) or "all",
            _status(key),
        )
    return listed


@keys_group.command("rotate", context_settings=CONTEXT)
@click.argument("key_id", metavar="KEY")
@click.option(
    "--grace",
    type=Duration(),
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="How long the old key stays valid.",
)
@click.option(
    "--expires",
    type=Duration(),
    metavar="DURATION",
    help="How long the new key is valid. Default: until the old one would have expired.",
)
@fleet_options
@json_switch
def rotate_command(
    key_id: str, grace: float, expires: float | None, place: str | None, pool: str | None, as_json: bool
) -> None:
    """Create a successor of KEY with the same tenant and scopes. The old key stays valid for a grace time."""
    settings = fleet_settings(place, pool, acts=True)
    made: list[tuple[str, ApiKey]] = []

    async def rotate(link: Link) -> None:
        old = await _stored_key(link.access, key_id)
        if _status(old) != "active":
            raise click.ClickException(f"the key {old.id} is {_status(old)}; create a new one")
        expires_at = old.expires_at if expires is None else _moment_in(expires)
        key, new = _new_key(settings, old.tenant, models=old.models, endpoints=old.endpoints, expires_at=expires_at)
        await _change(link, settings, "create", new)
        made.append((key, new))
        await _change(link, settings, "rotate", msgspec.structs.replace(old, expires_at=_moment_in(grace)))

    try:
        _run(settings, rotate)
    except click.ClickException as error:
        if not made:
            raise
        old = id_of(key_id)
        print_line(f"the old key {old} has not got its end: {error.message}; revoke it yourself", error=True)
        _show_new(*made[0], as_json=as_json)
        sys.exit(1)
    _show_new(*made[0], as_json=as_json)


@keys_group.command("revoke", context_settings=CONTEXT)
@click.argument("key_id", metavar="KEY")
@fleet_options
@json_switch
def revoke_command(key_id: str, place: str | None, pool: str | None, as_json: bool) -> None:
    """Revoke KEY (its id or prefix, as listed) at once. Requests that run already are finished."""
    settings = fleet_settings(place, pool, acts=True)

    async def revoke(link: Link) -> ApiKey:
        old = await _stored_key(link.access, key_id)
        await _change(link, settings, "revoke", old)
        return await _stored_key(link.access, old.id)

    revoked = _run(settings, revoke)
    if as_json:
        print_json(_described(revoked))
    else:
        print_line(f"{_prefix(revoked)} of {revoked.tenant} is revoked")


def _run(settings: FleetSettings, action: Callable[[Link], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with connected_link(settings, name="keys") as link:
            try:
                return await action(link)
            except StoreUnavailableError as error:
                raise NoAnswerError(f"the store of keys does not answer: {error}") from error

    return run_command(connected())


async def _change(link: Link, settings: FleetSettings, action: KeyAction, key: ApiKey) -> None:
    """Raises click.ClickException."""
    subject = admin_subject(PoolName(settings.pool), "keys", settings.actor)
    command = ChangeApiKey(action=action, key=key, secret_proof=secret_proof(settings.secret, key.id))
    answer = await ask(link.commands, subject, command, ApiKeyAnswered, absent=no_scheduler(settings))
    if answer.refusal:
        raise click.ClickException(f"nothing was changed: {answer.refusal}")


async def _stored_keys(store: KeyValueStore) -> list[ApiKey]:
    """Those that decode; ingresses refuse others, too."""
    found = []
    for value in (await store.read(KEY_NAMES)).values:
        try:
            found.append(decode_key(value.value))
        except ValueError as error:
            print_line(f"{value.key} does not decode and is not valid: {error}", error=True)
    return found


async def _stored_key(store: KeyValueStore, named: str) -> ApiKey:
    """By id or by prefix. Raises click.ClickException."""
    key_id = id_of(named)
    found = await store.get(name_of_key(key_id)) if re.fullmatch("[a-z0-9]{1,32}", key_id) else None
    if found is None:
        raise click.ClickException(f"there is no key {key_id}; see: pointsman keys list{as_given()} --all")
    try:
        return decode_key(found.value)
    except ValueError as error:
        raise click.ClickException(f"the key {key_id} does not decode: {error}") from error


def _new_key(
    settings: FleetSettings, tenant: Tenant, *, models: list[str], endpoints: list[str], expires_at: float
) -> tuple[str, ApiKey]:
    key_id = _random(ID_CHARACTERS, ID_LENGTH)
    key = f"pm-{key_id}-{_random(KEY_CHARACTERS, RANDOM_LENGTH)}"
    made = ApiKey(
        id=key_id,
        digest=key_hash(settings.secret)(key.encode()),
        tenant=tenant,
        created_at=time.time(),
        created_by=settings.actor,
        expires_at=expires_at,
        models=models,
        endpoints=endpoints,
    )
    return key, made


def id_of(named: str) -> str:
    """Id in a key, in its prefix, or as it is. Never the secret part of a key."""
    return named.removeprefix("pm-").partition("-")[0]


def _random(characters: str, length: int) -> str:
    return "".join(secrets.choice(characters) for _ in range(length))


def _moment_in(seconds: float | None) -> float:
    return time.time() + seconds if seconds is not None else 0.0


def _show_new(key: str, made: ApiKey, *, as_json: bool) -> None:
    if as_json:
        print_json({"key": key, **_described(made)})
        return
    until = f", valid until {_day(made.expires_at)}" if made.expires_at else ""
    print_line(f"key {made.id} of {made.tenant}{until}; it is shown only now:", error=True)
    print_line(key)


def _described(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "prefix": _prefix(key),
        "tenant": key.tenant,
        "created_at": _time(key.created_at),
        "created_by": key.created_by,
        "expires_at": _time(key.expires_at),
        "revoked_at": _time(key.revoked_at),
        "models": key.models,
        "endpoints": key.endpoints,
        "status": _status(key),
    }


def _prefix(key: ApiKey) -> str:
    return f"pm-{key.id}-"


def _status(key: ApiKey) -> str:
    if key.revoked_at:
        return "revoked"
    return "expired" if 0 < key.expires_at <= time.time() else "active"


def _time(moment: float) -> str | None:
    return _utc(moment).isoformat(timespec="seconds") if moment else None


def _utc(moment: float) -> datetime:
    return datetime.fromtimestamp(min(moment, UNIX_SECONDS_MAX), UTC)


def _day(moment: float) -> str:
    return f"{_utc(moment):%Y-%m-%d %H:%M}" if moment else ""
