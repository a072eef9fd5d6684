"""`pointsman scale`: sets or shows the wanted number of instances."""

import sys

import click

from pointsman.contracts.commands import ScaleAnswered, ScalePool
from pointsman.contracts.subjects import admin_subject
from pointsman.primitives import PoolName
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import WAIT_SECONDS_MAX, ask, connected_link, wait_until
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.explain.text import named
from pointsman_cli.options import CONTEXT, COUNT, WHOLE, fleet_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import print_line

REQUESTER = "pointsman scale"


@click.command("scale", context_settings=CONTEXT)
@click.argument("instances", type=WHOLE, required=False)
@click.option("--prefill", type=COUNT, metavar="P", help="Of a split pool: instances that prefill. With --decode.")
@click.option("--decode", type=COUNT, metavar="D", help="Instances that decode, instead of INSTANCES.")
@click.option("--wait", is_flag=True, help="Wait until that many are ready and no other is draining.")
@fleet_options
@json_switch
def scale_command(
    instances: int | None,
    prefill: int | None,
    decode: int | None,
    wait: bool,
    place: str | None,
    pool: str | None,
    as_json: bool,
) -> None:
    """Set the number of INSTANCES; without it, show the wanted number, the actual number, and the reason.

    The scaler starts missing instances. Surplus instances are drained, then stopped. A scaling policy that watches the
    load continues from the new number. In a split pool instances change their role, drained first, if their workers run
    with --role-switching; INSTANCES alone keeps the proportion.

    \b
      pointsman scale 6
      pointsman scale 4 --wait      return when four are ready and the others have gone
      pointsman scale --prefill 3 --decode 5
    """
    if (prefill is None) != (decode is None) or (prefill is not None and instances is not None):
        raise click.UsageError("name INSTANCES, or both --prefill and --decode")
    settings = fleet_settings(place, pool, acts=True)
    command = ScalePool(wanted=instances, prefill=prefill, decode=decode, asker=REQUESTER)
    sys.exit(run_command(_scale(settings, command, wait=wait, as_json=as_json)))


async def _scale(settings: FleetSettings, command: ScalePool, *, wait: bool, as_json: bool) -> int:
    absent = (
        f"no scaler acts for the pool '{settings.pool}' on {settings.nats_shown}; "
        "start a fleet with one: pointsman up --instances 4..8, or run pointsman-scaler"
    )
    async with connected_link(settings, name="scale") as link:

        async def request(command: ScalePool) -> ScaleAnswered:
            subject = admin_subject(PoolName(settings.pool), "scale", settings.actor)
            return await ask(link.commands, subject, command, ScaleAnswered, absent=absent)

        answer, done = await request(command), True
        if answer.refusal:
            raise click.ClickException(f"nothing was changed: {answer.refusal}")
        if wait and not answer.applied:
            answer, done = await wait_until(lambda: request(ScalePool()), _is_over, _progress, quiet=as_json)
    print_json(answer) if as_json else show(answer)
    if wait and answer.by_hand:
        return 1
    if not done:
        print_line(f"not done within {WAIT_SECONDS_MAX:g} s; it continues without this command", error=True)
    return 0 if done else 1


def _is_over(answer: ScaleAnswered) -> bool:
    """Nobody does what is left to people."""
    return answer.applied or bool(answer.by_hand)


def _progress(answer: ScaleAnswered) -> str:
    parts = [f"{answer.ready} of {answer.wanted} answer"]
    if answer.coming:
        parts.append(f"{answer.coming} starting")
    if answer.switching:
        parts.append(f"{answer.switching} changing their role")
    if answer.leaving:
        parts.append(f"{answer.leaving} draining")
    if answer.drained:
        parts.append(f"{len(answer.drained)} drained by operators: {named(answer.drained)}")
    if answer.trouble:
        parts.append(answer.trouble)
    return ", ".join(parts)


def show(answer: ScaleAnswered) -> None:
    state = "by hand" if answer.by_hand else "done" if answer.applied else "in progress"
    roles = f", {answer.prefill} to prefill and {answer.decode} to decode" if answer.prefill else ""
    print_line(f"{answer.wanted} wanted{roles} ({state}): {_progress(answer)}")
    if answer.by_hand:
        print_line(answer.by_hand)
    print_line(f"decided because: {answer.reason or 'nothing was decided yet'}")
    print_line(f"policy {answer.policy}, engines from {answer.provider}, from {answer.lowest} to {answer.highest}")
