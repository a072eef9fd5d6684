"""`pointsman tap`: follows the log of a fleet and prints selected events."""

import os
import sys
from base64 import b64encode

import click
import msgspec

from pointsman.ports import EventLog, LogEntry, LogExtent, LogReset, LogUnavailableError
from pointsman.primitives import Sequence
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import connected_link
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.event_loop import run_command
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.history.time_options import NOW, SEQUENCE, Moment, moment_in, shortly_before
from pointsman_cli.interruption import interruptible
from pointsman_cli.options import CONTEXT, fleet_options, json_switch, since_option, until_option
from pointsman_cli.tap.event_lines import line, reset_line
from pointsman_cli.tap.filters import BadPatternError, Filter, subject_pattern
from pointsman_cli.terminal import SafeConsole, json_text, print_line


class NoLogError(click.ClickException):
    """There is no log to read."""


@click.command("tap", context_settings=CONTEXT)
@click.argument("subject", default="")
@click.option("--type", "types", metavar="TYPE", multiple=True, help="Only events of this type. Repeatable.")
@click.option("--request", metavar="ID", help="Only events of this request (an id or its end).")
@click.option("--instance", metavar="ID", help="Only events of this instance and of requests placed on it.")
@fleet_options
@since_option
@until_option
@json_switch
def tap_command(
    subject: str,
    types: tuple[str, ...],
    request: str | None,
    instance: str | None,
    place: str | None,
    pool: str | None,
    since: str | None,
    until: str | None,
    as_json: bool,
) -> None:
    """Print the events of the log, one per line: wall time, sequence, subject, type, main fields.

    SUBJECT is a NATS subject, with or without 'pm.POOL.'; * matches one token, > the rest. TYPE may have wildcards.
    With --json, each line is an object with sequence, subject and event.

    \b
      pointsman tap                                     everything from now on
      pointsman tap 'kv.*'                              cache events of all engines
      pointsman tap 'pm.default.kv.engine-1'            of one engine
      pointsman tap --type RequestPlaced                decisions, with every candidate
      pointsman tap --since 1 --request ID              one request, from arrival to end
      pointsman tap --since 1 --until now --json | jq .     the whole log
    """
    try:
        named_pool, pattern = subject_pattern(subject)
        wanted = Filter(subject=pattern, types=types, request=request, instance=instance)
    except BadPatternError as error:
        raise click.UsageError(str(error)) from error
    settings = fleet_settings(place, pool or named_pool)
    printer = Printer(settings.speed, wanted, as_json=as_json)
    begin, start = (None, 1) if since in (None, NOW) else _beginning(settings, since)
    end = None if until is None else _end(settings, until)
    with interruptible(endless=end is None):
        run_command(_tap(settings, printer, start, begin, end))


class Printer:
    def __init__(self, speed: float, wanted: Filter, *, as_json: bool) -> None:
        self.wanted = wanted
        self._speed = speed
        self._as_json = as_json
        self._console = SafeConsole(soft_wrap=True)
        self.shown = 0
        """Entries."""

    def show(self, entry: LogEntry | LogReset) -> None:
        """Raises BrokenPipeError when the reader is gone."""
        if isinstance(entry, LogReset):
            if not self._as_json:
                self._console.print(reset_line(entry))
        elif self.wanted.matches(entry):
            self.shown += 1
            if self._as_json:
                print(_as_json(entry), flush=True)
            else:
                self._console.print(line(entry, speed=self._speed))


async def follow_log(
    log: EventLog, printer: Printer, *, start: Sequence = 1, since: Moment | None, until: Moment | None
) -> None:
    """`start`: nothing before it is `since`. `until` None: without bound; `Moment()`: the current end. Raises
    LogUnavailableError, BrokenPipeError."""
    extent = await log.extent()
    first = extent.last + 1 if since is None else since.sequence or start
    if until == Moment():
        until = Moment(sequence=extent.last)
    if until is not None and until.sequence is not None and first > until.sequence:
        _say_nothing_there(extent)
        return
    begun = since is None or since.at is None
    since_passed, until_passed = (since or Moment()).passed(), (until or Moment()).passed()
    any_there = False
    # To notice the end, every entry must be read: the server then filters nothing.
    async for entry in log.read(first, kinds=printer.wanted.kinds if until is None else ()):
        if isinstance(entry, LogReset):
            printer.show(entry)
            continue
        if until_passed(entry):
            break
        begun = begun or since_passed(entry)
        if begun:
            any_there = True
            printer.show(entry)
        if until is not None and until.sequence == entry.sequence:
            break
    if not any_there:
        _say_nothing_there(extent)
    elif not printer.shown:
        print_line("entries are there, but none of them matches", error=True)


def _say_nothing_there(extent: LogExtent) -> None:
    has = f"it has entries {extent.first:,} to {extent.last:,}" if extent.last else "it is empty"
    print_line(f"no entry of the log is between --since and --until: {has}", error=True)


def _beginning(settings: FleetSettings, text: str) -> tuple[Moment, Sequence]:
    """And an entry from which reading reaches it."""
    if SEQUENCE.fullmatch(text):
        return Moment(sequence=int(text)), int(text)
    history = LiveHistory(settings)
    moment = moment_in(history, text, begins=True)
    return moment, shortly_before(history, moment)


def _end(settings: FleetSettings, text: str) -> Moment:
    return Moment(sequence=int(text)) if SEQUENCE.fullmatch(text) else moment_in(LiveHistory(settings), text)


async def _tap(
    settings: FleetSettings, printer: Printer, start: Sequence, since: Moment | None, until: Moment | None
) -> None:
    async with connected_link(settings, name="tap", error=NoLogError) as link:
        try:
            await follow_log(link.log, printer, start=start, since=since, until=until)
        except LogUnavailableError as error:
            raise NoLogError(
                f"the pool '{settings.pool}' on {settings.nats_shown} has no log to read: {error}"
            ) from error
        except BrokenPipeError:  # nothing may be flushed there at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_json(entry: LogEntry) -> str:
    content: dict[str, object] = {"sequence": entry.sequence, "subject": entry.subject}
    if entry.event is None or b"\n" in entry.payload:
        content |= {"problem": entry.problem, "payload": b64encode(entry.payload).decode()}
    else:
        content["event"] = msgspec.Raw(entry.payload)
    return json_text(msgspec.json.encode(content))
