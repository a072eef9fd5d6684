"""The command itself: finds the fleet, follows its log, prints."""

import asyncio
import contextlib
import os
import sys
import time
from base64 import b64encode
from pathlib import Path

import click
import msgspec

from pointsman.adapters.clocks import ScaledClock
from pointsman.ports import EventLog, Link, LogEntry, LogMissingError, LogReset, LogUnavailableError
from pointsman.primitives import Sequence
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.telemetry import configure_logging
from pointsman_cli.discovery import fleet_settings
from pointsman_cli.options import which_fleet
from pointsman_cli.tap.event_lines import line, reset_line
from pointsman_cli.tap.filters import BadPatternError, Filter, subject_pattern
from pointsman_cli.terminal import SafeConsole

CONNECT_SECONDS_MAX = 5.0
CONNECT_POLL_SECONDS = 0.05


class NoLogError(click.ClickException):
    """There is nothing to read; the message says where was looked."""


@click.command("tap", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("subject", default="")
@click.option("--type", "types", metavar="TYPE", multiple=True, help="Only events of this type; may be repeated.")
@click.option("--without", metavar="TYPE", multiple=True, help="No events of this type; may be repeated.")
@click.option("--request", metavar="ID", help="Only events of this request; the end of its id is enough.")
@click.option("--instance", metavar="ID", help="Only events of this instance, and of requests that go there.")
@click.option("--since", type=click.IntRange(min=1), metavar="SEQUENCE", help="Begin at this sequence of the log.")
@click.option("--all", "everything", is_flag=True, help="Begin at the oldest event that is left.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@click.option("--no-follow", is_flag=True, help="End at what is the log's end now.")
@click.option("--keys", is_flag=True, help="Print block keys instead of their number.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object a line: sequence, subject, event.")
@which_fleet
def tap_command(
    subject: str,
    types: tuple[str, ...],
    without: tuple[str, ...],
    request: str | None,
    instance: str | None,
    since: int | None,
    everything: bool,
    count: int | None,
    no_follow: bool,
    keys: bool,
    as_json: bool,
    nats: str | None,
    data: Path | None,
    pool: str | None,
) -> None:
    """Print what goes into the log, live, one event a line.

    SUBJECT is a NATS subject, with or without its 'pm.POOL.': * stands for one token, > for the rest. Types may
    hold wildcards too. A line has the wall's time of day, the sequence in the log, where, what, and what matters.

    \b
      pointsman tap                                     everything from now on
      pointsman tap 'kv.*'                              what the engines' caches gain and lose
      pointsman tap 'pm.default.kv.engine-1'            one of them
      pointsman tap --type RequestPlaced                decisions, with every candidate's numbers
      pointsman tap --all --request ID                  one request, from arrival to end
      pointsman tap --all --no-follow --json | jq .     the whole log, for other tools
    """
    configure_logging("error", "text")
    try:
        named_pool, pattern = subject_pattern(subject)
        wanted = Filter(subject=pattern, types=types, without=without, request=request, instance=instance)
    except BadPatternError as error:
        raise click.UsageError(str(error)) from error
    settings = fleet_settings(nats, data, pool or named_pool)
    printer = Printer(settings.speed, wanted, keys=keys, as_json=as_json, count=count)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_tap(settings, printer, start=1 if everything else since, follow=not no_follow))


class Printer:
    """Prints the entries that are wanted, at most `count` of them."""

    def __init__(self, speed: float, wanted: Filter, *, keys: bool, as_json: bool, count: int | None) -> None:
        self.wanted = wanted
        self._speed = speed
        self._keys = keys
        self._as_json = as_json
        self._left = count
        self._console = SafeConsole(soft_wrap=True)

    @property
    def done(self) -> bool:
        return self._left == 0

    def show(self, entry: LogEntry | LogReset) -> None:
        """Print it, if it is wanted. Raises BrokenPipeError when nobody reads any more."""
        if isinstance(entry, LogReset):
            if not self._as_json:
                self._console.print(reset_line(entry))
            return
        if self.done or not self.wanted.matches(entry):
            return
        if self._left is not None:
            self._left -= 1
        if self._as_json:
            print(_as_json(entry), flush=True)
        else:
            self._console.print(line(entry, speed=self._speed, keys=self._keys))


async def follow_log(log: EventLog, printer: Printer, *, start: Sequence | None, follow: bool) -> None:
    """Show the log from `start` (None: from its end on), for ever or up to what is its end now.

    Raises LogMissingError, LogUnavailableError, BrokenPipeError.
    """
    extent = await log.extent()
    first = extent.last + 1 if start is None else start
    if not follow and first > extent.last:
        return
    # To notice the end, every entry must be seen: the server then filters nothing.
    kinds = printer.wanted.kinds if follow else ()
    async for entry in log.read(first, kinds=kinds):
        printer.show(entry)
        at_end = isinstance(entry, LogEntry) and entry.sequence >= extent.last
        if printer.done or (not follow and at_end):
            return


async def _tap(settings: FleetSettings, printer: Printer, *, start: Sequence | None, follow: bool) -> None:
    async with open_link(settings, ScaledClock(settings.speed), HealthBoard(), name="tap", only_reads=True) as link:
        await _connected(link, settings)
        try:
            await follow_log(link.log, printer, start=start, follow=follow)
        except (LogMissingError, LogUnavailableError) as error:
            msg = f"the pool '{settings.pool}' on {settings.nats_shown} has no log to read: {error}"
            raise NoLogError(msg) from error
        except BrokenPipeError:
            # Whoever read us has gone; nothing may be flushed there at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _connected(link: Link, settings: FleetSettings) -> None:
    """The link is made in the background: wait for it, within a bound. Raises NoLogError."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while not link.commands.connected:
        if time.monotonic() > deadline:
            msg = f"no nats-server answers at {settings.nats_shown}"
            raise NoLogError(msg)
        await asyncio.sleep(CONNECT_POLL_SECONDS)


def _as_json(entry: LogEntry) -> str:
    content: dict[str, object] = {"sequence": entry.sequence, "subject": entry.subject}
    if entry.event is None:
        content |= {"problem": entry.problem, "payload": b64encode(entry.payload).decode()}
    else:
        content["event"] = msgspec.Raw(entry.payload)
    return msgspec.json.encode(content).decode()
