"""`pointsman hit-rate`: the hit-rate ladder of a log, an archive or a bundle."""

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_figures import RUNG_HEADINGS, RUNGS, Tally
from pointsman.analysis.ladder_verdict import AdvisedOptions, Gap, Verdict, loaded_note, untold_note, verdict
from pointsman.simulation.replay.folding import copy_state
from pointsman.state.fleet import Knowledge
from pointsman.state.state import State
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.formatting import plural
from pointsman_cli.history.entries import History
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.start_point import StartPoint, beginning_of
from pointsman_cli.history.time_options import Moment, UpTo, moment_in
from pointsman_cli.options import CONTEXT, as_given, from_options, json_switch, since_option, until_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say, table, wall_time

TENANTS_SHOWN = 20
HOURS_SHOWN = 48


@click.command("hit-rate", context_settings=CONTEXT)
@from_options
@since_option
@until_option
@json_switch
def hit_rate_command(place: str | None, pool: str | None, since: str | None, until: str | None, as_json: bool) -> None:
    """Show how much of the prompts could have been cached, how much was, and where the rest was lost.

    \b
      pointsman hit-rate                                      the running fleet's log, up to now
      pointsman hit-rate --from incident.pmlog --since 07:30  only requests placed since then
      pointsman hit-rate --from .pointsman/archive.sqlite --json

    Six shares of prompt tokens, for the pool, its tenants and hours: an unbounded cache; one cache of the fleet's size; the
    engine that held most; the one known to hold most; predicted at the chosen one; delivered. The first line says where
    most is lost. docs/data.md defines each number.
    """
    with open_history(place, pool) as history:
        end, begin = moment_in(history, until), moment_in(history, since, begins=True)
        beginning = beginning_of(history, end)
        ladder, state = climbed(history, beginning, begin, end)
        total = ladder.figures.ever
        judged = verdict(total, AdvisedOptions(log=as_given(), fleet=fleet_as_given()))
        notes = list(_notes(judged, total, beginning, state))
        if as_json:
            print_json(_as_json(history.origin, judged, notes, total, ladder))
        else:
            _show(output_console(), history.origin, judged, notes, total, ladder)


def climbed(history: History, beginning: StartPoint, since: Moment, until: Moment) -> tuple[HitRateLadder, State]:
    state = State(history.settings) if beginning.state is None else copy_state(beginning.state)
    ladder = HitRateLadder(history.settings)
    ladder.begin(state)
    counting, reached = since == Moment(), since.reached()
    for entry in UpTo(shown(history, "counting", beginning.start), until):
        if not counting:
            counting = reached(entry)
            ladder.counts_from = entry.sequence if counting else entry.sequence + 1
        state.apply_entry(entry)
        if entry.event is not None:
            ladder.apply(entry.event, state)
    ladder.settle(state)
    return ladder, state


def _notes(judged: Verdict, total: Tally, beginning: StartPoint, state: State) -> list[str]:
    notes = [beginning.note] if beginning.note else []
    if beginning.is_blind:
        notes.append("prompts sent before count as new, until an engine tells that it has them")
    if judged.note:
        notes.append(judged.note)
    if loaded := loaded_note(total):
        notes.append(loaded)
    if untold := untold_note(total):
        notes.append(untold)
    blind = sorted(i.id for i in state.fleet.instances if i.knowledge is Knowledge.BLIND)
    if blind:
        notes.append(
            f"{', '.join(blind[:5])}{' and others' * (len(blind) > 5)} publish no cache events: what they hold is known "
            "only from their answers, so the best engine may have held more"
        )
    return notes


def _as_json(origin: str, judged: Verdict, notes: list[str], total: Tally, ladder: HitRateLadder) -> dict[str, Any]:
    figures = ladder.figures
    return {
        "origin": origin,
        "verdict": {"cause": judged.cause, "sentence": judged.sentence},
        "gaps": msgspec.to_builtins(judged.gaps),
        "notes": notes,
        "pool": _row(total),
        "tenants": [{"tenant": name} | _row(tally) for name, tally in figures.tenants()],
        "hours": [{"hour": begin} | _row(tally) for begin, tally in figures.hours()],
    }


def _row(tally: Tally) -> dict[str, Any]:
    tokens = dict(zip((rung.value for rung in RUNGS), tally.tokens, strict=True))
    return {
        "requests": tally.requests,
        "prompt_tokens": tally.prompt_tokens,
        "tokens": tokens,
        "loaded_tokens": tally.loaded_tokens,
        "untold": tally.untold,
    }


def _show(
    console: Console, origin: str, judged: Verdict, notes: list[str], total: Tally, ladder: HitRateLadder
) -> None:
    say(console, judged.sentence, "bold")
    say(console, origin, "dim")
    for note in notes:
        say(console, note, "yellow")
    if not total.prompt_tokens:
        return
    console.print(_ladder_table("", [("pool", total)]))
    _show_gaps(console, judged.gaps)
    tenants, hours = ladder.figures.tenants(), ladder.figures.hours()
    if len(tenants) > 1:
        console.print(_ladder_table("tenant", [(name or "(none)", tally) for name, tally in tenants[:TENANTS_SHOWN]]))
    if len(hours) > 1:
        named = [(f"{wall_time(begin, 1.0):%Y-%m-%d %H:%M}", tally) for begin, tally in hours]
        console.print(_ladder_table("hour", named[-HOURS_SHOWN:]))
    if len(tenants) > TENANTS_SHOWN or len(hours) > HOURS_SHOWN:
        say(console, f"{plural(len(tenants), 'tenant')}, {plural(len(hours), 'hour')}: --json has all", "dim")


def _ladder_table(heading: str, rows: list[tuple[str, Tally]]) -> Table:
    made = table(heading, ">requests", ">prompt tokens", *(f">{name}" for name in RUNG_HEADINGS))
    for name, tally in rows:
        made.add_row(name, f"{tally.requests:,}", f"{tally.prompt_tokens:,}", *(f"{tally.share(r):.1%}" for r in RUNGS))
    return made


def _show_gaps(console: Console, gaps: list[Gap]) -> None:
    for gap in sorted(gaps, key=lambda gap: -gap.share):
        if round(gap.share, 3):
            say(console, f"{100 * gap.share:5.1f} points lost by {gap.cause}: {gap.why}")
            say(console, f"        > {gap.advice}")
