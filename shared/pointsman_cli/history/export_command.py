"""`pointsman export`: a log in one portable file."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path

import click
import msgspec

from pointsman.ports import LogEntry
from pointsman.runtime.telemetry import configure_logging
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.checkpoint import kept_from
from pointsman_cli.history.entries import Header, History
from pointsman_cli.history.errors import HistoryError
from pointsman_cli.history.output import console_for, json_option, progress_console, write_json
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import Source, source_options
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import HELP, UpTo, moment_in

KIBIBYTE = 1024


@click.command("export", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@source_options
@click.option("--to", metavar="MOMENT", help=f"End there: {HELP}.")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@json_option
def export_command(source: Source, out: Path, to: str | None, force: bool, json_file: Path | None) -> None:
    """Write a log into OUT, one compressed file that replays like the log itself: for a bug report, or to keep.

    \b
      pointsman export incident.pmlog                                        the running fleet's log, up to now
      pointsman export incident.pmlog --to 07:31:05
      pointsman export incident.pmlog --from .pointsman/archive.sqlite       from the recorder's archive
      pointsman replay --from incident.pmlog --verify
      zcat incident.pmlog | jq .                                             it is JSON lines

    Of a log that has lost its beginning, the checkpoint that the other commands begin with goes along.

    There is no prompt and no answer in it: the log has block keys (hashes with the deployment's secret) and counts.
    Names of tenants and sessions, request ids and engines' addresses are in it as they are in the log.
    """
    configure_logging("error", "text")
    if out.exists() and not force:
        msg = f"{out} exists; name another file, or replace it with --force"
        raise HistoryError(msg)
    with source.open() as history:
        moment = moment_in(history, to)
        beginning = beginning_of(history, moment)
        checkpoint = kept_from(history, beginning.known) if beginning.known else None
        entries = iter(UpTo(shown(history, progress_console(), "exporting"), moment))
        first = next(entries, None)
        header = _header(history, first, whole=to is None)
        try:
            count = write_bundle(out, header, chain([first] if first else [], entries), checkpoint)
        except OSError as error:
            msg = f"cannot write {out}: {error.strerror}"
            raise HistoryError(msg) from error
    size = out.stat().st_size
    console = console_for(json_file)
    console.print(f"{count:,} entries of {history.origin}", markup=False, soft_wrap=True)
    if checkpoint:
        said = f"with the checkpoint of entry {checkpoint.as_of:,}: the log begins at entry {header.first:,}"
        console.print(said, markup=False, soft_wrap=True)
    elif beginning.note:
        console.print(beginning.note, style="yellow", markup=False, soft_wrap=True)
    console.print(f"written to {out} ({size / KIBIBYTE:,.0f} KiB); no prompts are in it", markup=False, soft_wrap=True)
    console.print(f"read it with: pointsman replay --from {out} --verify", markup=False, soft_wrap=True)
    if json_file:
        as_of = checkpoint.as_of if checkpoint else None
        told = {"origin": history.origin, "file": str(out), "entries": count, "checkpoint": as_of, "bytes": size}
        write_json(json_file, told)


def _header(history: History, first: LogEntry | None, *, whole: bool) -> Header:
    """Of what is exported: a log that runs may have lost some of its head since it was opened."""
    header = msgspec.structs.replace(history.header, pool_settings=asdict(history.settings))
    if first is not None:
        pool = header.pool or (first.subject.split(".")[1] if first.subject.count(".") else "")
        left = header.entries and header.last - first.sequence + 1
        header = msgspec.structs.replace(header, pool=pool, first=first.sequence, entries=left)
    return header if whole else msgspec.structs.replace(header, last=0, entries=0)
