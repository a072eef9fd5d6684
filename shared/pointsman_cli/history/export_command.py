"""`pointsman export`: writes a log into one file, or to standard output."""

import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import click
import msgspec

from pointsman.ports import LogEntry
from pointsman_cli.history.bundle import stream_bundle, write_bundle
from pointsman_cli.history.checkpoint import kept_from
from pointsman_cli.history.entries import Header, History, HistoryError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import UpTo, moment_in
from pointsman_cli.options import CONTEXT, from_options, json_switch, until_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, progress_console, say

STANDARD_OUTPUT = Path("-")
KIBIBYTE = 1024


@click.command("export", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@from_options
@until_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_switch
def export_command(
    file: Path, place: str | None, pool: str | None, until: str | None, force: bool, as_json: bool
) -> None:
    """Write a log into FILE, compressed, for a bug report or for replay elsewhere. FILE may be -, standard output.

    \b
      pointsman export incident.pmlog --until 07:31:05
      pointsman export incident.pmlog --from .pointsman/archive.sqlite       from the recorder's archive
      pointsman export -                                                     to standard output, where there is no place for a file
      pointsman replay --from incident.pmlog --verify
      zcat incident.pmlog | jq .                                             it is JSON lines

    FILE has no prompts and no answers, only block keys (hashes with the deployment's secret) and counts; it does have
    tenant and session names, request ids and engine addresses. If the log lost its beginning, FILE has a checkpoint.
    """
    streams = file == STANDARD_OUTPUT
    _check(file, force=force, as_json=as_json)
    with open_history(place, pool) as history:
        moment = moment_in(history, until)
        beginning = beginning_of(history, moment)
        checkpoint = kept_from(history, beginning.known) if beginning.known else None
        entries = iter(UpTo(shown(history, "exporting"), moment))
        first = next(entries, None)
        header = _header(history, first, whole=until is None)
        try:
            everything = chain([first] if first else [], entries)
            count = (
                stream_bundle(sys.stdout.buffer, header, everything, checkpoint)
                if streams
                else write_bundle(file, header, everything, checkpoint)
            )
        except OSError as error:
            raise HistoryError(f"cannot write {file}: {error.strerror}") from error
    if as_json:
        as_of = checkpoint.as_of if checkpoint else None
        size = file.stat().st_size
        summary = {"origin": history.origin, "file": str(file), "entries": count, "checkpoint": as_of, "bytes": size}
        print_json(summary)
        return
    console = progress_console() if streams else output_console()
    say(console, f"{count:,} entries of {history.origin}")
    if checkpoint:
        say(console, f"with the checkpoint of entry {checkpoint.as_of:,}: the log begins at entry {header.first:,}")
    elif beginning.note:
        say(console, beginning.note, "yellow")
    if streams:
        say(console, "written to standard output; no prompts are in it")
        return
    say(console, f"written to {file} ({file.stat().st_size / KIBIBYTE:,.0f} KiB); no prompts are in it")
    say(console, f"read it with: pointsman replay --from {file} --verify")


def _check(file: Path, *, force: bool, as_json: bool) -> None:
    """Raises click.UsageError, HistoryError."""
    if file != STANDARD_OUTPUT:
        if file.exists() and not force:
            raise HistoryError(f"{file} exists; name another file, or replace it with --force")
    elif as_json:
        raise click.UsageError("--json prints on standard output, where the log goes; leave it out, or name a file")
    elif sys.stdout.isatty():
        raise click.UsageError(
            "standard output is a terminal; send it into a file: pointsman export - > incident.pmlog"
        )


def _header(history: History, first: LogEntry | None, *, whole: bool) -> Header:
    """A live log may have lost its head since it was opened."""
    named = {} if history.guesses_settings else asdict(history.settings)
    header = msgspec.structs.replace(history.header, pool_settings=named)
    if first is not None:
        pool = header.pool or (first.subject.split(".")[1] if first.subject.count(".") else "")
        left = header.entries and header.last - first.sequence + 1
        header = msgspec.structs.replace(header, pool=pool, first=first.sequence, entries=left)
    return header if whole else msgspec.structs.replace(header, last=0, entries=0)
