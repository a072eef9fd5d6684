"""`pointsman fleet`: the fleet as the leader reports it, as a table or JSON. Does not read the log."""

import asyncio
import contextlib

import click
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pointsman.contracts.commands import FleetDescribed, InstanceDescribed
from pointsman.ports import Commands
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import connected_link, described, stalled_log
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.formatting import by_name
from pointsman_cli.interruption import interruptible
from pointsman_cli.options import CONTEXT, fleet_options, json_switch
from pointsman_cli.terminal import SafeConsole, json_text, output_console, status, table, wall_time

WATCH_SECONDS = 1.0
COLUMNS = (
    "instance",
    "URL",
    "since",
    "status",
    "knowledge",
    ">pending",
    ">in prefill",
    ">decoding",
    ">cached blocks",
    ">off by",
)


@click.command("fleet", context_settings=CONTEXT)
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C; with --json, one line each.")
@fleet_options
@json_switch
def fleet_command(watch: bool, place: str | None, pool: str | None, as_json: bool) -> None:
    """Show the instances of a running fleet: status, load, cached blocks, state of the cache index.

    Knowledge of a cache is 'exact' (events flow, digests agree), 'degraded' or 'blind'. Status 'unschedulable': serves
    another model than its pool; 'ejected': removed for a while because of failures or slowness. Below the table are the
    reasons. 'Off by': recent median error of predicted prefill times; pointsman calibrate lowers it.

    \b
      pointsman fleet --watch
      pointsman fleet --json | jq '.instances[] | select(.knowledge != "exact")'
      pointsman fleet --from nats://10.0.0.5:4222    a fleet on another machine
    """
    with interruptible(endless=watch):
        run_command(_show(fleet_settings(place, pool), as_json=as_json, watch=watch))


async def _show(settings: FleetSettings, *, as_json: bool, watch: bool) -> None:
    async with connected_link(settings, name="fleet") as link:
        if not watch:
            fleet = await _described(link.commands, settings)
            print(_as_json(fleet, indent=2)) if as_json else output_console().print(fleet_table(fleet))
            return
        with contextlib.ExitStack() as stack:
            text = Text("asking the scheduler ...")
            live = None if as_json else stack.enter_context(Live(text, console=SafeConsole(), auto_refresh=False))
            while True:
                fleet = await _described(link.commands, settings)
                print(_as_json(fleet, indent=0), flush=True) if live is None else live.update(
                    fleet_table(fleet), refresh=True
                )
                await asyncio.sleep(WATCH_SECONDS)


async def _described(commands: Commands, settings: FleetSettings) -> FleetDescribed:
    fleet = await described(commands, settings)
    instances = sorted(fleet.instances, key=lambda one: by_name(one.instance))
    return msgspec.structs.replace(fleet, instances=instances)


def _as_json(fleet: FleetDescribed, *, indent: int) -> str:
    content = msgspec.to_builtins(fleet)
    del content["type"]
    for shown in content["instances"]:
        shown["digest"] = f"{shown['digest']:016x}"  # as `state` prints it: readers of JSON round large numbers
        if shown["prediction_error"] < 0:
            shown["prediction_error"] = None
    encoded = msgspec.json.encode(content)
    return json_text(msgspec.json.format(encoded, indent=indent) if indent else encoded)


def fleet_table(fleet: FleetDescribed) -> RenderableType:
    speed = f", {fleet.speed:g} times real time" if fleet.speed != 1 else ""
    rows = table(*COLUMNS, title=f"pool {fleet.pool}: {fleet.policy}{speed}")
    rows.caption = f"led by {fleet.scheduler}, term {fleet.term}; the log is read up to entry {fleet.as_of:,}"
    rows.caption_justify = "left"
    for column in rows.columns[:2]:  # other commands take the name, people copy the URL: neither is cut
        column.no_wrap, column.overflow = False, "fold"
    for instance in fleet.instances:
        rows.add_row(*_row(instance))
    reasons = [_why_not_exact(instance, fleet.speed) for instance in fleet.instances if instance.knowledge_reason]
    doubts = [
        Text(f"  {instance.instance} is {instance.status}: {instance.doubt}", style=status(instance.status).style)
        for instance in fleet.instances
        if instance.doubt not in ("", instance.knowledge_reason)
    ]
    stalled = [Text(text, style="bold red")] if (text := stalled_log(fleet)) else []
    return Group(*stalled, rows, *doubts, *reasons)


def _why_not_exact(instance: InstanceDescribed, speed: float) -> Text:
    since = wall_time(instance.knowledge_since, speed)
    return Text(f"  {instance.instance} is {instance.knowledge} since {since:%H:%M:%S}: {instance.knowledge_reason}")


def _state(instance: InstanceDescribed) -> str:
    parts = [instance.status] if instance.role == "both" else [instance.status, instance.role]
    return ", ".join(parts) + (f" → {instance.becomes}" if instance.becomes else "")


def _row(instance: InstanceDescribed) -> tuple[RenderableType, ...]:
    since = wall_time(instance.epoch / 1000, 1.0)
    return (
        instance.instance,
        instance.url,
        f"{since:%H:%M:%S}",
        status(_state(instance)),
        status(instance.knowledge),
        str(instance.pending),
        str(instance.in_prefill),
        str(instance.decoding),
        str(instance.cached_blocks),
        f"{instance.prediction_error:.0%}" if instance.prediction_error >= 0 else "",
    )
