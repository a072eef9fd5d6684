"""`pointsman fleet`: the fleet as the scheduler knows it, as a table or as JSON.

Asks the leader over the command channel and reads nothing from the log, so it costs the same on a fleet of any age.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.commands import DescribeFleet, FleetDescribed, InstanceDescribed
from pointsman.contracts.subjects import fleet_view_subject
from pointsman.ports import Commands, CommandTimeoutError, LogUnavailableError, NoResponderError
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.telemetry import configure_logging
from pointsman.state.fleet import Status
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.options import which_fleet
from pointsman_cli.terminal import SafeConsole, wall_time

ANSWER_SECONDS = 3.0
WATCH_SECONDS = 1.0
CONNECT_POLL_SECONDS = 0.01
PIPE_WIDTH = 120
UNSCHEDULABLE = str(Status.UNSCHEDULABLE)
STYLES = {
    "exact": "green",
    "degraded": "yellow",
    "blind": "red",
    "suspected": "red",
    "unschedulable": "red",
    "draining": "yellow",
    "ejected": "red",
}


class NoAnswerError(click.ClickException):
    """The fleet's scheduler did not answer; the message says what to look at."""


@click.command("fleet", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--json", "as_json", is_flag=True, help="Print the scheduler's answer as JSON.")
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C; with --json, a line each.")
@which_fleet
def fleet_command(as_json: bool, watch: bool, nats: str | None, data: Path | None, pool: str | None) -> None:
    """Show the instances of a running fleet: status, load, cached blocks, and how well their caches are known.

    \b
    Knowledge is 'exact' (events flow, digests agree), 'degraded' or 'blind'. An instance that serves another model than its
    pool is 'unschedulable'; one that failed requests, or is far slower than the others, is 'ejected' for a while. Below the table is why. 'Off by' is how wrong predictions of prefill times were of late (median);
    pointsman calibrate makes them better.
      pointsman fleet                                the fleet that runs on this machine
      pointsman fleet --watch                        the same, live
      pointsman fleet --json | jq '.instances[] | select(.knowledge != "exact")'
      pointsman fleet --nats nats://10.0.0.5:4222    one that runs elsewhere
    """
    configure_logging("error", "text")
    settings = fleet_settings(nats, data, pool)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(settings, as_json=as_json, watch=watch))


async def _show(settings: FleetSettings, *, as_json: bool, watch: bool) -> None:
    async with open_link(settings, ScaledClock(settings.speed), HealthBoard(), name="fleet", only_reads=True) as link:
        await _connected(link.commands, settings)
        if not watch:
            fleet = await _ask(link.commands, settings)
            print(_as_json(fleet, indent=2)) if as_json else _console().print(fleet_table(fleet))
        elif as_json:
            await _repeat(link.commands, settings, lambda fleet: print(_as_json(fleet, indent=0), flush=True))
        else:
            with Live(Text("asking the scheduler ..."), console=SafeConsole(), auto_refresh=False) as live:
                await _repeat(link.commands, settings, lambda fleet: live.update(fleet_table(fleet), refresh=True))


async def _connected(commands: Commands, settings: FleetSettings) -> None:
    """The link is made in the background; people rather wait a moment than hear that it is not there yet."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not commands.connected:
        if time.monotonic() > deadline:
            message = f"no nats-server answers at {settings.nats_shown}"
            raise NoAnswerError(message)
        await asyncio.sleep(CONNECT_POLL_SECONDS)


async def _repeat(commands: Commands, settings: FleetSettings, show: Callable[[FleetDescribed], None]) -> None:
    while True:
        show(await _ask(commands, settings))
        await asyncio.sleep(WATCH_SECONDS)


async def _ask(commands: Commands, settings: FleetSettings) -> FleetDescribed:
    subject = fleet_view_subject(PoolName(settings.pool))
    place = f"the pool '{settings.pool}' on {settings.nats_shown}"
    try:
        answer = await commands.request(subject, DescribeFleet(), timeout=ANSWER_SECONDS)
    except NoResponderError as error:
        message = f"no scheduler serves {place}; look at its log, or name the pool with --pool"
        raise NoAnswerError(message) from error
    except (CommandTimeoutError, LogUnavailableError) as error:
        message = f"the scheduler of {place} did not answer within {ANSWER_SECONDS:g} s"
        raise NoAnswerError(message) from error
    if not isinstance(answer, FleetDescribed):
        message = f"the scheduler answered with a {type(answer).__name__}; is it of this version?"
        raise NoAnswerError(message)
    return msgspec.structs.replace(answer, instances=sorted(answer.instances, key=_by_number))


def _by_number(instance: InstanceDescribed) -> tuple[int, str]:
    """engine-2 before engine-10."""
    return len(instance.instance), instance.instance


def _console() -> Console:
    """As wide as the terminal, and wide enough where there is none."""
    return SafeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _as_json(fleet: FleetDescribed, *, indent: int) -> str:
    content = msgspec.to_builtins(fleet)
    del content["type"]
    encoded = msgspec.json.encode(content)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def fleet_table(fleet: FleetDescribed) -> RenderableType:
    """For people, with the reasons of those that take nothing below it."""
    speed = f", {fleet.speed:g} times real time" if fleet.speed != 1 else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"pool {fleet.pool}: {fleet.policy}{speed}",
        caption=f"{fleet.scheduler}, term {fleet.term}, log as of {fleet.as_of}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("instance", no_wrap=True)
    table.add_column("URL", overflow="fold")
    for column in ("since", "status", "knowledge"):
        table.add_column(column, no_wrap=True)
    for column in ("pending", "in prefill", "decoding", "cached blocks", "off by"):
        table.add_column(column, justify="right")
    for instance in fleet.instances:
        table.add_row(*_row(instance))
    reasons = [_why_not_exact(instance, fleet.speed) for instance in fleet.instances if instance.knowledge_reason]
    unschedulable = [_unschedulable(instance) for instance in fleet.instances if instance.status == UNSCHEDULABLE]
    return Group(table, *unschedulable, *reasons)


def _unschedulable(instance: InstanceDescribed) -> Text:
    """Why nothing is placed there."""
    return Text(f"  {instance.instance} is {instance.status}: {instance.doubt}", style=STYLES[instance.status])


def _why_not_exact(instance: InstanceDescribed, speed: float) -> Text:
    since = wall_time(instance.knowledge_since, speed)
    return Text(f"  {instance.instance} is {instance.knowledge} since {since:%H:%M:%S}: {instance.knowledge_reason}")


def _status(instance: InstanceDescribed) -> str:
    """With its role, where it does not do all of a request."""
    return instance.status if instance.role == "both" else f"{instance.status}, {instance.role}"


def _row(instance: InstanceDescribed) -> tuple[RenderableType, ...]:
    since = wall_time(instance.epoch / 1000, 1.0)
    return (
        instance.instance,
        instance.url,
        f"{since:%H:%M:%S}",
        Text(_status(instance), style=STYLES.get(instance.status, "")),
        Text(instance.knowledge, style=STYLES.get(instance.knowledge, "")),
        str(instance.pending),
        str(instance.in_prefill),
        str(instance.decoding),
        str(instance.cached_blocks),
        f"{instance.prediction_error:.0%}" if instance.prediction_error >= 0 else "",
    )
