"""Where the commands of this package write: tables to standard output, progress to standard error, numbers to a file."""

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pointsman_cli.history.errors import HistoryError
from pointsman_cli.output_file import json_of
from pointsman_cli.terminal import SafeConsole

PIPE_WIDTH = 180
STANDARD_OUTPUT = "-"

json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write it as JSON; - prints it instead of the table.",
)


def console_for(json_file: Path | None) -> Console:
    """For what people read. Where JSON goes to standard output, people's part goes to standard error."""
    to_stderr = json_file is not None and str(json_file) == STANDARD_OUTPUT
    stream = sys.stderr if to_stderr else sys.stdout
    return SafeConsole(file=stream, width=None if stream.isatty() else PIPE_WIDTH)


def progress_console() -> Console:
    return SafeConsole(stderr=True)


def write_json(json_file: Path, content: dict[str, Any]) -> None:
    """Raises HistoryError."""
    encoded = json_of(content)
    if str(json_file) == STANDARD_OUTPUT:
        sys.stdout.write(encoded.decode())
        return
    try:
        json_file.write_bytes(encoded)
    except OSError as error:
        msg = f"cannot write {json_file}: {error.strerror}"
        raise HistoryError(msg) from error
