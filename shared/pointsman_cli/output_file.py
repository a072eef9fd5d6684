"""JSON output, to standard output or a file."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from typing_extensions import override

from pointsman_cli.terminal import json_text


class OutputFile(click.Path):
    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not value:
            self.fail("must not be empty", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        there = next(above for above in path.absolute().parents if above.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            self.fail(f"cannot write {path}: {there} is no directory that can be written to", param, ctx)
        return path


OUTPUT_FILE = OutputFile()


def json_of(found: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def print_json(found: object) -> None:
    sys.stdout.write(json_text(json_of(found)))
    sys.stdout.flush()


def write_json(path: Path, found: object) -> None:
    """Raises click.ClickException."""
    write_file(path, json_of(found))


def write_file(path: Path, content: bytes) -> None:
    """Creates the directory. Raises click.ClickException."""
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
