"""`pointsman drain`: takes one instance out of service, or back."""

import asyncio
import sys
from typing import get_args

import click

from pointsman.contracts.commands import DrainAnswered, DrainInstance, FleetDescribed, UndrainInstance
from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import admin_subject
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import (
    WAIT_SECONDS_MAX,
    ask,
    connected_link,
    described,
    no_scheduler,
    wait_until,
)
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.interruption import interruptible
from pointsman_cli.options import CONTEXT, as_given, fleet_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import print_line

REASON = "pointsman drain"


@click.command("drain", context_settings=CONTEXT)
@click.argument("instance")
@click.option("--undo", is_flag=True, help="Put it back into service.")
@click.option(
    "--role",
    type=click.Choice(get_args(Role)),
    help="When it is drained, put it back into service in this role. A scaler that sizes roles may undo it.",
)
@click.option("--wait", is_flag=True, help="Wait until it has no requests.")
@fleet_options
@json_switch
def drain_command(
    instance: str,
    undo: bool,
    role: Role | None,
    wait: bool,
    place: str | None,
    pool: str | None,
    as_json: bool,
) -> None:
    """Drain INSTANCE: it gets no new requests, its queue moves to others, and running requests finish.

    It stays in the fleet and keeps its cache until it is stopped or undrained. A scaler replaces it, but does not stop it.

    \b
      pointsman drain engine-2 --wait      then restart or upgrade it
      pointsman drain engine-2 --undo
      pointsman drain engine-2 --role decode
    """
    if undo and role:
        msg = "--undo and --role contradict each other"
        raise click.UsageError(msg)
    settings, name = fleet_settings(place, pool, acts=True), InstanceId(instance)
    command: DrainInstance | UndrainInstance = UndrainInstance(instance=name)
    if not undo:
        command = DrainInstance(instance=name, reason=REASON, becomes=role or "")
    with interruptible():
        sys.exit(asyncio.run(_drain(settings, command, wait=wait and not undo, as_json=as_json)))


async def _drain(
    settings: FleetSettings, command: DrainInstance | UndrainInstance, *, wait: bool, as_json: bool
) -> int:
    async with connected_link(settings, name="drain") as link:
        subject = admin_subject(PoolName(settings.pool), "drain", settings.actor)
        answer = await ask(link.commands, subject, command, DrainAnswered, absent=no_scheduler(settings))
        if answer.refusal:
            raise click.ClickException(answer.refusal)
        idle = True
        if wait:
            _, idle = await wait_until(
                lambda: described(link.commands, settings),
                lambda fleet: _requests_left(fleet, answer.instance) == 0,
                lambda fleet: f"{answer.instance}: {_requests_left(fleet, answer.instance)} requests left",
                quiet=as_json,
            )
    print_json(answer) if as_json else print_line(_text(answer, idle=wait and idle))
    if answer.warning:
        print_line(f"warning: {answer.warning}", error=True)
    if not idle:
        print_line(f"{answer.instance} was not idle within {WAIT_SECONDS_MAX:g} s; it goes on draining", error=True)
    return 0 if idle else 1


def _requests_left(fleet: FleetDescribed, instance: InstanceId) -> int:
    known = next((i for i in fleet.instances if i.instance == instance), None)
    return known.pending + known.in_prefill + known.decoding if known else 0


def _text(answer: DrainAnswered, *, idle: bool) -> str:
    if not answer.draining:
        return f"{answer.instance} takes requests"
    if idle:
        return f"{answer.instance} is drained: stop it, or take it back with: pointsman drain{as_given()} {answer.instance} --undo"
    return f"{answer.instance} drains: {answer.requests} requests left there; watch with: pointsman fleet{as_given()} --watch"
