"""`pointsman state`: the fleet as it was known at some moment of a log."""

from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.runtime.telemetry import configure_logging
from pointsman.simulation.replay import fold
from pointsman_cli.history.output import console_for, json_option, progress_console, write_json
from pointsman_cli.history.progress import shown
from pointsman_cli.history.snapshot import describe
from pointsman_cli.history.sources import Source, source_options
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import HELP, moment_in

STYLES = {
    "exact": "green",
    "degraded": "yellow",
    "blind": "red",
    "suspected": "red",
    "down": "red",
    "draining": "yellow",
    "ejected": "red",
}


@click.command("state", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@source_options
@click.option("--at", metavar="MOMENT", help=f"When: {HELP}. Default: the end of the log.")
@json_option
def state_command(source: Source, at: str | None, json_file: Path | None) -> None:
    """Show the fleet as it was known at some moment: instances, queues, holdings, doubts.

    \b
      pointsman state --at 4711                        after entry 4711 of the running fleet's log
      pointsman state --at 07:31:05                    what was known at that time of day
      pointsman state --from incident.pmlog --at 07:31:05.250
      pointsman state --from .pointsman/archive.sqlite --json - | jq '.instances[] | select(.doubt != "")'

    It is the state of who follows the log in its order. A leader is ahead of that by its own decisions that were not
    yet written; `pointsman replay --verify` rebuilds its view for every decision.
    """
    configure_logging("error", "text")
    console = console_for(json_file)
    with source.open() as history:
        moment = moment_in(history, at)
        beginning = beginning_of(history, moment)
        entries = shown(history, progress_console(), "folding", beginning.start)
        state = fold(entries, settings=history.settings, until=moment.is_before, known=beginning.state)
        described = describe(state, now=moment.at)
        if json_file:
            write_json(json_file, {"origin": history.origin, "beginning": beginning.note, **described})
        if json_file is None or str(json_file) != "-":
            _show(console, history.origin, beginning.note, described)


def _show(console: Console, origin: str, beginning: str, state: dict[str, Any]) -> None:
    console.print(origin, markup=False, soft_wrap=True)
    if beginning:
        console.print(beginning, style="yellow", markup=False, soft_wrap=True)
    console.print(_instances(state))
    requests = state["requests"]
    if state["quiet_seconds"] > 0:
        console.print(f"nothing happened for the last {state['quiet_seconds']:,.1f} s before that moment", style="dim")
    console.print(
        f"requests: {requests['pending']} pending, {requests['prefill']} in prefill, {requests['decoding']} decoding; "
        f"{state['placements']:,} placements so far"
    )
    console.print(f"prefixes: {state['prefixes_counted']:,} counted, {state['prefixes_hot']:,} of them hot")
    for instance in state["instances"]:
        if instance["doubt"]:
            console.print(f"{instance['instance']} is in doubt: {instance['doubt']}", style="yellow", markup=False)
    for name in state["departed_with_requests"]:
        console.print(f"{name} is gone and still has requests", style="yellow", markup=False)
    for name in state["strangers"]:
        console.print(f"{name} reports but never joined, as far as this log tells", style="yellow", markup=False)
    if state["writes_lost"]:
        console.print(f"{state['writes_lost']} writes were lost before this moment", style="red")


def _instances(state: dict[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"as of entry {state['as_of']:,}, {state['wall_time']}, term {state['term']}",
        title_justify="left",
    )
    for column in ("instance", "status", "knowledge"):
        table.add_column(column, no_wrap=True)
    for column in ("pending", "in prefill", "decoding", "tokens", "queue", "blocks", "promised", "silent"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    for instance in state["instances"]:
        table.add_row(
            instance["instance"],
            Text(instance["status"], style=STYLES.get(instance["status"], "")),
            Text(instance["knowledge"], style=STYLES.get(instance["knowledge"], "")),
            str(instance["pending"]),
            str(instance["in_prefill"]),
            str(instance["decoding"]),
            f"{instance['pending_tokens'] + instance['prefill_tokens']:,}",
            f"{instance['queue_seconds']:.3f} s",
            f"{instance['blocks']:,}",
            f"{instance['promised_blocks']:,}",
            f"{instance['silent_seconds']:.1f} s",
            instance["digest"],
        )
    return table
