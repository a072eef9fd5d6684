"""`pointsman scale`: have another number of instances, or see how many are wanted and why."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import click
import msgspec

from pointsman.contracts.commands import ScaleAnswered, ScalePool
from pointsman.contracts.subjects import scale_subject
from pointsman.ports import Commands
from pointsman.primitives import PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.telemetry import configure_logging
from pointsman_cli.command_client import ask, asking
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.options import which_fleet

ASKER = "pointsman scale"
WATCH_SECONDS = 0.5


@click.command("scale", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("instances", type=click.IntRange(min=0), required=False)
@click.option("--wait", is_flag=True, help="Stay until that many answer and no other is on its way out.")
@click.option(
    "--seconds-max", type=click.FloatRange(min=0), default=600.0, show_default=True, help="With --wait: how long."
)
@click.option("--json", "as_json", is_flag=True, help="Print the scaler's answer as JSON.")
@which_fleet
def scale_command(
    instances: int | None,
    wait: bool,
    seconds_max: float,
    as_json: bool,
    nats: str | None,
    data: Path | None,
    pool: str | None,
) -> None:
    """Have so many INSTANCES; without a number, show how many are wanted, how many there are, and why.

    The scaler starts what is missing; what is too much takes no new requests, finishes what it has, and is stopped.
    Nothing is lost. A scaling policy that watches the load goes on from there.

    \b
      pointsman scale               how things are
      pointsman scale 6             six from now on
      pointsman scale 4 --wait      come back when four answer and the others have gone
    """
    configure_logging("error", "text")
    settings = fleet_settings(nats, data, pool)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(_scale(settings, instances, wait=wait, seconds_max=seconds_max, as_json=as_json)))


async def _scale(
    settings: FleetSettings, instances: int | None, *, wait: bool, seconds_max: float, as_json: bool
) -> int:
    async with asking(settings, name="scale") as commands:
        answer = await _ask(commands, settings, ScalePool(wanted=instances, asker=ASKER))
        if answer.refusal:
            message = f"nothing was changed: {answer.refusal}"
            raise click.ClickException(message)
        done = not wait
        if wait:
            answer, done = await _until_applied(commands, settings, answer, seconds_max, quiet=as_json)
    print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() if as_json else _text(answer))
    if not done:
        print(f"not done within {seconds_max:g} s; it goes on without this command", file=sys.stderr)
    return 0 if done else 1


async def _until_applied(
    commands: Commands, settings: FleetSettings, answer: ScaleAnswered, seconds_max: float, *, quiet: bool
) -> tuple[ScaleAnswered, bool]:
    """Follow the decision until it, or one that came after it, is carried out; whether it was."""
    deadline, shown = time.monotonic() + seconds_max, ""
    while not answer.applied and time.monotonic() < deadline:
        if not quiet and (line := _progress(answer)) != shown:
            shown = line
            print(line, flush=True)
        await asyncio.sleep(WATCH_SECONDS)
        answer = await _ask(commands, settings, ScalePool())
    return answer, answer.applied


async def _ask(commands: Commands, settings: FleetSettings, command: ScalePool) -> ScaleAnswered:
    nobody = (
        f"no scaler acts for the pool '{settings.pool}' on {settings.nats_shown}; "
        "start a fleet with one: pointsman up --scale 4..8, or run pointsman-scaler"
    )
    return await ask(commands, scale_subject(PoolName(settings.pool)), command, ScaleAnswered, nobody=nobody)


def _progress(answer: ScaleAnswered) -> str:
    parts = [f"{answer.ready} of {answer.wanted} answer"]
    if answer.coming:
        parts.append(f"{answer.coming} starting")
    if answer.leaving:
        parts.append(f"{answer.leaving} draining")
    if answer.trouble:
        parts.append(answer.trouble)
    return ", ".join(parts)


def _text(answer: ScaleAnswered) -> str:
    state = "done" if answer.applied else "under way"
    return (
        f"{answer.wanted} wanted ({state}): {_progress(answer)}\n"
        f"decided because: {answer.reason or 'nothing was decided yet'}\n"
        f"policy {answer.policy}, engines from {answer.provider}, from {answer.lowest} to {answer.highest}"
    )
