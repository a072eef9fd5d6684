"""`pointsman explain`: finds the request and prints its timeline, as text or JSON."""

import click
import msgspec

from pointsman.bounds import Bounds
from pointsman.primitives import RequestId
from pointsman.runtime.number_types import Whole
from pointsman_cli.command_client import stalled_log
from pointsman_cli.explain.lookup import request_named, slowest_requests
from pointsman_cli.explain.page import show_slowest, show_timeline, timeline_as_json
from pointsman_cli.explain.timeline import timeline_of
from pointsman_cli.history.entries import NotInLogError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, open_history
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import Moment
from pointsman_cli.options import CONTEXT, from_options, json_switch
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say


@click.command("explain", context_settings=CONTEXT)
@click.argument("request_id", required=False)
@from_options
@click.option(
    "--slowest",
    type=Whole(Bounds(1, 1000)),
    metavar="N",
    help="List the N answered requests with the longest time to first token; with 1, explain it.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Also candidates, predictions, queues, and its entries in the log."
)
@json_switch
def explain_command(
    request_id: str | None, place: str | None, pool: str | None, slowest: int | None, everything: bool, as_json: bool
) -> None:
    """Explain one request: why it was slow in one line, the sentences behind it, and where the time went.

    \b
      pointsman explain 7f3a                              in the running fleet, by the start of its id
      pointsman explain --from incident.pmlog --slowest 10          list the slowest ones
      pointsman explain --from incident.pmlog --slowest 1           explain the slowest
      pointsman explain --from .pointsman/archive.sqlite 7f3a --json | jq -r .verdict.sentence

    REQUEST_ID is the x-pointsman-request-id of the answer, an unambiguous start or end of it, or the x-request-id. With
    --all, `pace`: real prefill time over that of the cost model. `promised`: hit blocks expected from earlier prompts. Grey rows were not
    weighed by the policy; their numbers are computed from the same state.
    """
    if (request_id is None) == (slowest is None):
        msg = "choose a request: an id (or an end of it), or --slowest N"
        raise click.UsageError(msg)
    with open_history(place, pool) as history:
        if slowest is not None and slowest > 1:
            _list_slowest(history, slowest, as_json=as_json)
        else:
            _explain(history, _request_id(history, request_id), everything=everything, as_json=as_json)


def _request_id(history: History, request_id: str | None) -> RequestId:
    entries = shown(history, "looking for it")
    if request_id is None:
        return slowest_requests(entries, 1)[0].request
    try:
        return request_named(entries, request_id, begins=history.begins if history.header.first > 1 else "")
    except NotInLogError as error:
        if stalled := stalled_log(history.fleet):  # it may not have been written yet
            msg = f"{stalled}; {error.message}"
            raise NotInLogError(msg) from error
        raise


def _explain(history: History, request: RequestId, *, everything: bool, as_json: bool) -> None:
    timeline = timeline_of(
        shown(history, "reading its events"),
        request,
        history.settings,
        beginning=lambda as_of: beginning_of(history, Moment(sequence=as_of)),
    )
    if as_json:
        print_json({"origin": history.origin, "beginning": timeline.note, **timeline_as_json(timeline)})
        return
    console = output_console()
    say(console, history.origin, "dim")
    if timeline.note:
        say(console, timeline.note, "yellow")
    show_timeline(console, timeline, everything=everything)


def _list_slowest(history: History, count: int, *, as_json: bool) -> None:
    found = slowest_requests(shown(history, "looking for them"), count)
    if as_json:
        print_json({"origin": history.origin, "slowest": msgspec.to_builtins(found)})
        return
    console = output_console()
    say(console, history.origin, "dim")
    show_slowest(console, found, history.settings.speed)
