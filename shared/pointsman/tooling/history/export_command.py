"""`pointsman export`: a log in one portable file."""

from pathlib import Path

import click
import msgspec

from pointsman.chassis.telemetry import configure_logging
from pointsman.tooling.history.bundle import write_bundle
from pointsman.tooling.history.entries import Header, History, settings_in
from pointsman.tooling.history.errors import HistoryError
from pointsman.tooling.history.moments import HELP, UpTo, moment_in
from pointsman.tooling.history.output import console_for, json_option, progress_console, write_json
from pointsman.tooling.history.progress import shown
from pointsman.tooling.history.sources import Source, source_options

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

    There is no prompt and no answer in it: the log has block keys (hashes with the deployment's secret) and counts.
    Names of tenants and sessions, request ids and engines' addresses are in it as they are in the log.
    """
    configure_logging("error", "text")
    if out.exists() and not force:
        msg = f"{out} exists; name another file, or replace it with --force"
        raise HistoryError(msg)
    with source.open() as history:
        entries = UpTo(shown(history, progress_console(), "exporting"), moment_in(history, to))
        header = _header(history, whole=to is None)
        try:
            count = write_bundle(out, header, entries)
        except OSError as error:
            msg = f"cannot write {out}: {error.strerror}"
            raise HistoryError(msg) from error
    size = out.stat().st_size
    console = console_for(json_file)
    console.print(f"{count:,} entries of {history.origin}", markup=False, soft_wrap=True)
    console.print(f"written to {out} ({size / KIBIBYTE:,.0f} KiB); no prompts are in it", markup=False, soft_wrap=True)
    console.print(f"read it with: pointsman replay --from {out} --verify", markup=False, soft_wrap=True)
    if json_file:
        write_json(json_file, {"origin": history.origin, "file": str(out), "entries": count, "bytes": size})


def _header(history: History, *, whole: bool) -> Header:
    header = msgspec.structs.replace(history.header, pool_settings=settings_in(history))
    if not header.pool:
        subject = next((entry.subject for entry in history), "")
        header = msgspec.structs.replace(header, pool=subject.split(".")[1] if subject.count(".") else "")
    return header if whole else msgspec.structs.replace(header, last=0, entries=0)
