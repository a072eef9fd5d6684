"""`pointsman explain`: finds the request and prints its timeline, as text or JSON."""

from functools import partial

import click
import msgspec

from pointsman.bounds import Bounds
from pointsman.runtime.number_types import Whole
from pointsman_cli.command_client import stalled_log
from pointsman_cli.explain.lookup import Found, Slow, request_named, slowest_requests
from pointsman_cli.explain.page import show_slowest, show_timeline, timeline_as_json
from pointsman_cli.explain.window import timeline_around
from pointsman_cli.history.entries import NotInLogError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, open_history
from pointsman_cli.history.start_point import entries_since
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.options import CONTEXT, MOMENT_HELP, from_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say


@click.command("explain", context_settings=CONTEXT)
@click.argument("request_id", required=False)
@from_options
@click.option(
    "--slowest",
    type=Whole(Bounds(1, 1000)),
    metavar="N",
    help="List the N ended requests that waited longest for their first token, or without one for their end; with 1, explain it.",
)
@click.option("--since", metavar="MOMENT", help=f"With --slowest: of those that arrived from {MOMENT_HELP}.")
@click.option(
    "--all", "everything", is_flag=True, help="Also candidates, predictions, queues, and its entries in the log."
)
@json_switch
def explain_command(
    request_id: str | None,
    place: str | None,
    pool: str | None,
    slowest: int | None,
    since: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Explain one request: why it was slow in one line, the sentences behind it, and where the time went.

    \b
      pointsman explain 7f3a                              in the running fleet, by the start of its id
      pointsman explain --from incident.pmlog --slowest 10          list the slowest ones
      pointsman explain --from incident.pmlog --slowest 1           explain the slowest
      pointsman explain --slowest 10 --since 07:30                  in the running fleet, of those that arrived since then
      pointsman explain --from .pointsman/archive.sqlite 7f3a --json | jq -r .verdict.sentence

    REQUEST_ID is the x-pointsman-request-id of the answer, an unambiguous start or end of it, or the x-request-id. With
    --all, `pace`: real prefill time over that of the cost model. `promised`: hit blocks expected from earlier prompts. Grey rows were not
    weighed by the policy; their numbers are computed from the same state.
    """
    if (request_id is None) == (slowest is None):
        raise click.UsageError("choose a request: an id (or an end of it), or --slowest N")
    if since is not None and slowest is None:
        raise click.UsageError("--since is for --slowest: an id is looked for in the whole log")
    with open_history(place, pool) as history:
        if request_id is not None:
            found = _named(history, request_id)
        else:
            entries = entries_since(history, moment_in(history, since, begins=True), "looking for them")
            requests = slowest_requests(entries, slowest or 1)
            if slowest != 1:
                _list(history, requests, as_json=as_json)
                return
            found = Found(requests[0].request, requests[0].sequence)
        _explain(history, found, everything=everything, as_json=as_json)


def _named(history: History, text: str) -> Found:
    try:
        return request_named(history, text, partial(shown, history, "looking for it"))
    except NotInLogError as error:
        if stalled := stalled_log(history.fleet):  # it may not have been written yet
            raise NotInLogError(f"{stalled}; {error.message}") from error
        raise


def _explain(history: History, found: Found, *, everything: bool, as_json: bool) -> None:
    timeline = timeline_around(history, found, partial(shown, history, "reading its events"))
    if as_json:
        print_json({"origin": history.origin, "beginning": timeline.note, **timeline_as_json(timeline)})
        return
    console = output_console()
    say(console, history.origin, "dim")
    if timeline.note:
        say(console, timeline.note, "yellow")
    show_timeline(console, timeline, everything=everything)


def _list(history: History, slowest: list[Slow], *, as_json: bool) -> None:
    if as_json:
        print_json({"origin": history.origin, "slowest": msgspec.to_builtins(slowest)})
        return
    console = output_console()
    say(console, history.origin, "dim")
    show_slowest(console, slowest, history.settings.speed)
