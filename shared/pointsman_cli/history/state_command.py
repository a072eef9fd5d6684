"""`pointsman state`: the fleet at a moment, as a follower of the log."""

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pointsman.primitives import EngineSeconds
from pointsman.simulation.replay import fold
from pointsman.state.fleet import Instance
from pointsman.state.instance_status import ejection_reason
from pointsman.state.queue_figures import queue_figures
from pointsman.state.slower_tiers import TIERS
from pointsman.state.state import State
from pointsman.state.workload import Request, Stage
from pointsman_cli.formatting import by_name
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.options import CONTEXT, from_options, json_switch, until_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say, status, table, wall_time

COLUMNS = (
    "instance", "status", "knowledge", ">pending", ">in prefill", ">decoding", ">tokens", ">queue", ">blocks", ">promised",
    ">silent", "digest",
)  # fmt: skip


@click.command("state", context_settings=CONTEXT)
@from_options
@until_option
@json_switch
def state_command(place: str | None, pool: str | None, until: str | None, as_json: bool) -> None:
    """Show the fleet at a moment of the log: instances, queues, caches.

    \b
      pointsman state --until 4711                     after entry 4711 of the running fleet's log
      pointsman state --from incident.pmlog --until 07:31:05.250
      pointsman state --from .pointsman/archive.sqlite --json | jq '.instances[] | select(.doubt != "")'

    This is a follower's view, in log order, without the leader's decisions that were not yet in the log;
    `pointsman replay --verify` rebuilds the leader's view of every decision.
    """
    with open_history(place, pool) as history:
        moment = moment_in(history, until)
        beginning = beginning_of(history, moment)
        entries = shown(history, "folding", beginning.start)
        state = fold(entries, settings=history.settings, until=moment.passed(), known=beginning.state)
        described = describe(state, now=moment.at)
        if as_json:
            print_json({"origin": history.origin, "beginning": beginning.note, **described})
        else:
            _show(output_console(), history.origin, beginning.note, described)


def _show(console: Console, origin: str, beginning: str, state: dict[str, Any]) -> None:
    say(console, origin)
    if beginning:
        say(console, beginning, "yellow")
    console.print(_instances(state))
    requests = state["requests"]
    if state["quiet_seconds"] >= 0.05:  # shown with one decimal
        say(console, f"nothing happened in the last {state['quiet_seconds']:,.1f} s before that moment", "dim")
    say(
        console,
        f"requests: {requests['pending']} pending, {requests['prefill']} in prefill, {requests['decoding']} decoding; "
        f"{state['placements']:,} placements so far",
    )
    say(console, f"prefixes: {state['prefixes_counted']:,} counted, {state['prefixes_hot']:,} of them hot")
    for instance in state["instances"]:
        if instance["doubt"]:
            say(console, f"{instance['instance']} is in doubt: {instance['doubt']}", "yellow")
    for name in state["departed_with_requests"]:
        say(console, f"{name} is gone and still has requests", "yellow")
    for name in state["unregistered"]:
        say(console, f"{name} reports but never joined, according to this log", "yellow")
    if state["writes_lost"]:
        say(console, f"{state['writes_lost']} writes were lost before this moment", "red")


def _instances(state: dict[str, Any]) -> Table:
    rows = table(*COLUMNS, title=f"as of entry {state['as_of']:,}, {state['wall_time']}, term {state['term']}")
    for instance in sorted(state["instances"], key=lambda one: by_name(one["instance"])):
        rows.add_row(
            instance["instance"],
            status(instance["status"]),
            status(instance["knowledge"]),
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
    return rows


def describe(state: State, *, now: EngineSeconds | None = None) -> dict[str, Any]:
    """A State as plain data."""
    now = state.last_at if now is None else now
    requests = state.workload.requests.values()
    return {
        "as_of": state.sequence,
        "at": now,
        "wall_time": wall_time(now, state.settings.speed).isoformat(timespec="milliseconds"),
        "quiet_seconds": max(0.0, now - state.last_at),
        "term": state.term,
        "speed": state.settings.speed,
        "block_tokens": state.settings.block_tokens,
        "writes_lost": state.writes_lost,
        "instances": [_instance(state, instance, now) for instance in state.fleet.instances],
        "departed_with_requests": [
            name for name, queue in state.workload.queues.items() if queue.requests and name not in state.fleet
        ],
        "unregistered": sorted(state.unregistered),
        "requests": {str(stage): sum(request.stage is stage for request in requests) for stage in Stage},
        "placements": state.placements,
        "prefixes_counted": len(state.hotness),
        "prefixes_hot": state.hotness.extended,
        "queues": [_request(request, now) for request in requests],
    }


def _instance(state: State, instance: Instance, now: EngineSeconds) -> dict[str, Any]:
    return {
        "instance": instance.id,
        "url": instance.url,
        "epoch": instance.epoch,
        "status": str(instance.status),
        "knowledge": str(instance.knowledge),
        "doubt": instance.doubt,
        "unschedulable": instance.unschedulable,
        "ejection": ejection_reason(state, instance),
        "knowledge_reason": instance.knowledge_reason,
        "suspected": instance.suspected,
        "silent_seconds": now - instance.heard_at,
        **queue_figures(state, instance.id, now),
        "blocks": state.index.blocks(instance.id),
        "digest": f"{state.index.digest(instance.id):016x}",
        "slower_tiers": {tier: blocks for tier in TIERS if (blocks := state.slower.blocks(tier, instance.id))},
        "promised_blocks": state.promises.blocks(instance.id),
        "cache_sequence": instance.sequence,
        "kv_usage": instance.kv_usage,
        "engine_running": instance.running,
        "engine_waiting": instance.waiting,
        "correction": state.latency.correction(instance.id),
    }


def _request(request: Request, now: EngineSeconds) -> dict[str, Any]:
    return {
        "request": request.id,
        "stage": str(request.stage),
        "instance": request.instance,
        "tenant": request.tenant,
        "age_seconds": now - request.arrived_at,
        "left_seconds": request.deadline - now,
        "prompt_tokens": request.prompt_tokens,
        "uncached_tokens": request.uncached_tokens,
        "hit_blocks": request.hit_blocks,
        "predicted_ttft": request.predicted_ttft,
        "attempt": request.attempt,
    }
