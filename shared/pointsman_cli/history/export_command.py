"""`pointsman export`: writes a log into one file."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path

import click
import msgspec

from pointsman.ports import LogEntry
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.checkpoint import kept_from
from pointsman_cli.history.entries import Header, History, HistoryError
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import UpTo, moment_in
from pointsman_cli.options import CONTEXT, from_options, json_switch, until_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say

KIBIBYTE = 1024


@click.command("export", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@from_options
@until_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_switch
def export_command(
    file: Path, place: str | None, pool: str | None, until: str | None, force: bool, as_json: bool
) -> None:
    """Write a log into FILE, compressed, for a bug report or for replay elsewhere.

    \b
      pointsman export incident.pmlog --until 07:31:05
      pointsman export incident.pmlog --from .pointsman/archive.sqlite       from the recorder's archive
      pointsman replay --from incident.pmlog --verify
      zcat incident.pmlog | jq .                                             it is JSON lines

    FILE has no prompts and no answers, only block keys (hashes with the deployment's secret) and counts; it does have
    tenant and session names, request ids and engine addresses. If the log lost its beginning, FILE has a checkpoint.
    """
    if file.exists() and not force:
        msg = f"{file} exists; name another file, or replace it with --force"
        raise HistoryError(msg)
    with open_history(place, pool) as history:
        moment = moment_in(history, until)
        beginning = beginning_of(history, moment)
        checkpoint = kept_from(history, beginning.known) if beginning.known else None
        entries = iter(UpTo(shown(history, "exporting"), moment))
        first = next(entries, None)
        header = _header(history, first, whole=until is None)
        try:
            count = write_bundle(file, header, chain([first] if first else [], entries), checkpoint)
        except OSError as error:
            msg = f"cannot write {file}: {error.strerror}"
            raise HistoryError(msg) from error
    size = file.stat().st_size
    if as_json:
        as_of = checkpoint.as_of if checkpoint else None
        summary = {"origin": history.origin, "file": str(file), "entries": count, "checkpoint": as_of, "bytes": size}
        print_json(summary)
        return
    console = output_console()
    say(console, f"{count:,} entries of {history.origin}")
    if checkpoint:
        say(console, f"with the checkpoint of entry {checkpoint.as_of:,}: the log begins at entry {header.first:,}")
    elif beginning.note:
        say(console, beginning.note, "yellow")
    say(console, f"written to {file} ({size / KIBIBYTE:,.0f} KiB); no prompts are in it")
    say(console, f"read it with: pointsman replay --from {file} --verify")


def _header(history: History, first: LogEntry | None, *, whole: bool) -> Header:
    """A live log may have lost its head since it was opened."""
    header = msgspec.structs.replace(history.header, pool_settings=asdict(history.settings))
    if first is not None:
        pool = header.pool or (first.subject.split(".")[1] if first.subject.count(".") else "")
        left = header.entries and header.last - first.sequence + 1
        header = msgspec.structs.replace(header, pool=pool, first=first.sequence, entries=left)
    return header if whole else msgspec.structs.replace(header, last=0, entries=0)
