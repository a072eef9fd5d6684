"""`pointsman drain` and `pointsman undrain`: take one instance out of service, or back into it, without losing a request."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import click
import msgspec

from pointsman.contracts.commands import DrainAnswered, DrainInstance, FleetDescribed, UndrainInstance
from pointsman.contracts.subjects import drain_subject
from pointsman.ports import Commands
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.telemetry import configure_logging
from pointsman_cli.command_client import ask, asking, described
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.options import which_fleet

WATCH_SECONDS = 0.5
REASON = "pointsman drain"


@click.command("drain", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("instance")
@click.option("--reason", default=REASON, show_default=True, help="Why, for the log.")
@click.option("--wait", is_flag=True, help="Stay until it has nothing left to do.")
@click.option(
    "--seconds-max", type=click.FloatRange(min=0), default=600.0, show_default=True, help="With --wait: how long."
)
@click.option("--json", "as_json", is_flag=True, help="Print the leader's answer as JSON.")
@which_fleet
def drain_command(
    instance: str,
    reason: str,
    wait: bool,
    seconds_max: float,
    as_json: bool,
    nats: str | None,
    data: Path | None,
    pool: str | None,
) -> None:
    """Take INSTANCE out of service: nothing new goes there, what waits for it moves, what it is at finishes.

    It stays in the fleet and keeps its cache until it is stopped or 'pointsman undrain' takes it back. A scaler counts it
    as missing and replaces it, but does not stop it.

    \b
      pointsman drain engine-2 --wait      then restart or upgrade it in peace
      pointsman undrain engine-2
    """
    configure_logging("error", "text")
    settings = fleet_settings(nats, data, pool)
    with contextlib.suppress(KeyboardInterrupt):
        command = DrainInstance(instance=InstanceId(instance), reason=reason)
        sys.exit(asyncio.run(_drain(settings, command, wait=wait, seconds_max=seconds_max, as_json=as_json)))


@click.command("undrain", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("instance")
@click.option("--json", "as_json", is_flag=True, help="Print the leader's answer as JSON.")
@which_fleet
def undrain_command(instance: str, as_json: bool, nats: str | None, data: Path | None, pool: str | None) -> None:
    """Let INSTANCE take requests again.

    \b
      pointsman undrain engine-2
    """
    configure_logging("error", "text")
    settings = fleet_settings(nats, data, pool)
    command = UndrainInstance(instance=InstanceId(instance))
    sys.exit(asyncio.run(_drain(settings, command, wait=False, seconds_max=0.0, as_json=as_json)))


async def _drain(
    settings: FleetSettings,
    command: DrainInstance | UndrainInstance,
    *,
    wait: bool,
    seconds_max: float,
    as_json: bool,
) -> int:
    async with asking(settings, name="drain") as commands:
        answer = await _ask(commands, settings, command)
        if answer.refusal:
            raise click.ClickException(answer.refusal)
        idle = not wait or await _until_idle(commands, settings, answer, seconds_max, quiet=as_json)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print(_text(answer, idle=wait and idle))
    if not idle:
        print(f"{answer.instance} was not idle within {seconds_max:g} s; it goes on draining", file=sys.stderr)
    return 0 if idle else 1


async def _ask(commands: Commands, settings: FleetSettings, command: DrainInstance | UndrainInstance) -> DrainAnswered:
    nobody = f"no scheduler serves the pool '{settings.pool}' on {settings.nats_shown}; look at its log"
    return await ask(commands, drain_subject(PoolName(settings.pool)), command, DrainAnswered, nobody=nobody)


async def _until_idle(
    commands: Commands, settings: FleetSettings, answer: DrainAnswered, seconds_max: float, *, quiet: bool
) -> bool:
    """Whether it has nothing left to do, or has gone, within the time."""
    deadline, shown = time.monotonic() + seconds_max, -1
    while time.monotonic() < deadline:
        left = _requests_left(await described(commands, settings), answer.instance)
        if not quiet and left != shown:
            shown = left
            print(f"{answer.instance}: {left} requests left", flush=True)
        if left == 0:
            return True
        await asyncio.sleep(WATCH_SECONDS)
    return False


def _requests_left(fleet: FleetDescribed, instance: InstanceId) -> int:
    known = next((i for i in fleet.instances if i.instance == instance), None)
    return known.pending + known.in_prefill + known.decoding if known else 0


def _text(answer: DrainAnswered, *, idle: bool) -> str:
    if not answer.draining:
        return f"{answer.instance} takes requests"
    if idle:
        return (
            f"{answer.instance} is drained: it may be stopped, or taken back with: pointsman undrain {answer.instance}"
        )
    return f"{answer.instance} drains: {answer.requests} requests left there; watch with: pointsman fleet --watch"
