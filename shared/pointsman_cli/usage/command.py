"""`pointsman usage`: who used how much, from a log, an archive or a bundle, as a table, CSV or JSON."""

import csv
import io
import sys
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console

from pointsman_cli.formatting import plural
from pointsman_cli.history.entries import HistoryError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import UpTo, moment_in
from pointsman_cli.options import CONTEXT, comma_list, from_options, json_switch, since_option, until_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import csv_cell, output_console, print_line, say, table
from pointsman_cli.usage.accounting import DIMENSIONS, Dimension, Group, TooManyGroupsError, Usage, UsageAccount

UNKNOWN = "(unknown)"
COUNTS = (
    "requests", "finished", "rejected", "failed", "cancelled", "computed_tokens", "cached_tokens", "output_tokens",
    "prefill_seconds", "decode_seconds", "engine_seconds", "uncounted",
)  # fmt: skip
COLUMNS = {
    "requests": "requests", "finished": "finished", "rejected": "rejected", "computed_tokens": "computed",
    "cached_tokens": "cached", "output_tokens": "output", "engine_seconds": "engine s",
}  # fmt: skip
DECIMALS = 3


@click.command("usage", context_settings=CONTEXT)
@from_options
@since_option
@until_option
@click.option(
    "--by",
    default=",".join(DIMENSIONS),
    show_default=True,
    callback=lambda context, option, value: _dimensions(context, option, value),
    metavar="NAMES",
    help="Rows: any of tenant, model, day.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print only CSV on standard output.")
@json_switch
def usage_command(
    place: str | None,
    pool: str | None,
    since: str | None,
    until: str | None,
    by: tuple[Dimension, ...],
    as_csv: bool,
    as_json: bool,
) -> None:
    """Report requests, tokens and engine seconds per tenant, model and day.

    \b
      pointsman usage                                              the running fleet's log, up to now
      pointsman usage --from .pointsman/archive.sqlite --by tenant
      pointsman usage --from incident.pmlog --since 2026-11-01T00:00Z --until 2026-12-01T00:00Z --csv

    Requests count where they ended, on the UTC day of their end; a time without Z is local. Tokens are those that engines reported for finished
    requests: computed (prompt tokens that no cache had), cached, output. Engine seconds are those that requests spent on
    engines, in engine time, also if they failed or were cancelled. docs/data.md defines each number.
    """
    if as_csv and as_json:
        raise click.UsageError("--csv or --json, not both")
    with open_history(place, pool) as history:
        end, begin = moment_in(history, until), moment_in(history, since, begins=True)
        beginning = beginning_of(history, end)
        account = UsageAccount(history.settings.speed, by)
        if beginning.state is not None:
            account.begin(beginning.state)
        try:
            account.read(UpTo(shown(history, "counting", beginning.start), end), since=begin)
        except TooManyGroupsError as error:
            raise HistoryError(str(error)) from error
        if as_json:
            print_json(_as_json(account, origin=history.origin, beginning=beginning.note))
        elif as_csv:
            for caveat in filter(None, (beginning.note, *_left_out(account))):
                print_line(caveat, error=True)
            sys.stdout.write(_as_csv(account))
        else:
            _show(output_console(), account, history.origin, beginning.note)


def _dimensions(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
    names = comma_list(context, option, value)
    if unknown := [name for name in names if name not in DIMENSIONS]:
        raise click.BadParameter(f"'{unknown[0]}' is none of {', '.join(DIMENSIONS)}")
    return tuple(name for name in DIMENSIONS if name in names)


def _row(group: Group, usage: Usage, by: tuple[Dimension, ...]) -> dict[str, Any]:
    named = {name: getattr(group, name) for name in by}
    return named | {name: round(getattr(usage, name), DECIMALS) for name in COUNTS}


def _as_json(account: UsageAccount, *, origin: str, beginning: str) -> dict[str, Any]:
    return {
        "origin": origin,
        "beginning": beginning,
        "by": list(account.by),
        "rows": [_row(group, usage, account.by) for group, usage in account.rows()],
        "total": _row(Group(), account.total, ()),
        "in_flight": account.in_flight,
        "unattributed": account.unattributed,
    }


def _as_csv(account: UsageAccount) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*account.by, *COUNTS])
    for group, usage in account.rows():
        cells = _row(group, usage, account.by)
        writer.writerow([csv_cell(str(cells[name])) for name in account.by] + [cells[name] for name in COUNTS])
    return text.getvalue()


def _show(console: Console, account: UsageAccount, origin: str, beginning: str) -> None:
    say(console, origin, "dim")
    if beginning:
        say(console, beginning, "yellow")
    rows = table(*account.by, *(f">{heading}" for heading in COLUMNS.values()))
    for group, usage in account.rows():
        names = [_name(group, name) for name in account.by]
        rows.add_row(*names, *_numbers(usage))
    if account.by and len(account.groups) > 1:
        rows.add_section()
        rows.add_row("total", *[""] * (len(account.by) - 1), *_numbers(account.total), style="bold")
    console.print(rows)
    total = account.total
    say(console, f"{total.failed:,} failed, {total.cancelled:,} cancelled, {account.in_flight:,} in flight at the end")
    if total.uncounted:
        say(console, f"engines reported no token counts for {total.uncounted:,} finished requests", "yellow")
    for caveat in _unattributed(account):
        say(console, caveat, "yellow")


def _left_out(account: UsageAccount) -> Iterator[str]:
    """What the rows do not count, or count as nobody's."""
    if account.in_flight:
        yield f"{plural(account.in_flight, 'request')} in flight at the end: in no row"
    yield from _unattributed(account)


def _unattributed(account: UsageAccount) -> Iterator[str]:
    if account.unattributed:
        yield (
            f"{plural(account.unattributed, 'request')} arrived before the log, or under an earlier version without a "
            f"scheduler: {UNKNOWN}"
        )


def _name(group: Group, by: Dimension) -> str:
    if by == "tenant":
        return group.tenant or UNKNOWN
    return str(getattr(group, by))


def _numbers(usage: Usage) -> list[str]:
    values = (getattr(usage, name) for name in COLUMNS)
    return [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in values]
