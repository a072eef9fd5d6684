"""`pointsman explain`: which request is meant, and its story on the terminal or as JSON."""

from pathlib import Path

import click
import msgspec

from pointsman.primitives import RequestId, Sequence
from pointsman.runtime.telemetry import configure_logging
from pointsman.state.state import State
from pointsman_cli.explain.lookup import last_request, request_named, slowest_requests
from pointsman_cli.explain.page import show_slowest, show_story, story_as_json
from pointsman_cli.explain.timeline import story_of
from pointsman_cli.history.output import STANDARD_OUTPUT, console_for, json_option, progress_console, write_json
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, Source, source_options
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import Moment


@click.command("explain", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("request_id", required=False)
@source_options
@click.option("--last", is_flag=True, help="The request that ended last.")
@click.option(
    "--slowest",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    help="List the N answered requests with the longest time to first token; with 1, tell its story.",
)
@json_option
def explain_command(
    source: Source, request_id: str | None, last: bool, slowest: int | None, json_file: Path | None
) -> None:
    """Tell the story of one request: what was known, what was chosen and why, and where the time went.

    \b
      pointsman explain 7f3a                              a request of the running fleet, by the beginning of its id
      pointsman explain --from incident.pmlog --slowest 10          who waited longest
      pointsman explain --from incident.pmlog --slowest 1           and the story of the one who did
      pointsman explain --from .pointsman/archive.sqlite --last --json - | jq .why

    REQUEST_ID is the x-request-id of the answer, or a beginning or end of it that no other request has. `pace` is how
    long prefills take on an instance, over what its cost model says; `promised` are hit blocks that prompts placed
    before would bring. Rows in grey the policy did not weigh: their numbers are computed from the same state.
    """
    configure_logging("error", "text")
    if sum((request_id is not None, last, slowest is not None)) != 1:
        msg = "say which request: an id (or a part of it), --last, or --slowest N"
        raise click.UsageError(msg)
    with source.open() as history:
        if slowest is not None and slowest > 1:
            _list_slowest(history, slowest, json_file)
        else:
            _explain(history, _meant(history, request_id, slowest), json_file)


def _meant(history: History, request_id: str | None, slowest: int | None) -> RequestId:
    entries = shown(history, progress_console(), "looking for it")
    if request_id is not None:
        return request_named(entries, request_id)
    if slowest is not None:
        return slowest_requests(entries, 1)[0].request
    return last_request(entries)


def _explain(history: History, request: RequestId, json_file: Path | None) -> None:
    entries = shown(history, progress_console(), "reading its story")
    note = ""

    def known(as_of: Sequence) -> State | None:
        nonlocal note
        beginning = beginning_of(history, Moment(sequence=as_of))
        note = beginning.note
        return beginning.state

    story = story_of(entries, request, history.settings, known=known)
    if json_file:
        write_json(json_file, {"origin": history.origin, "beginning": note, **story_as_json(story)})
    if json_file is None or str(json_file) != STANDARD_OUTPUT:
        console = console_for(json_file)
        console.print(history.origin, style="dim", markup=False, soft_wrap=True)
        if note:
            console.print(note, style="yellow", markup=False, soft_wrap=True)
        show_story(console, story)


def _list_slowest(history: History, count: int, json_file: Path | None) -> None:
    found = slowest_requests(shown(history, progress_console(), "looking for them"), count)
    if json_file:
        write_json(json_file, {"origin": history.origin, "slowest": msgspec.to_builtins(found)})
    if json_file is None or str(json_file) != STANDARD_OUTPUT:
        console = console_for(json_file)
        console.print(history.origin, style="dim", markup=False, soft_wrap=True)
        show_slowest(console, found, history.settings.speed)
