"""What a command has found, written into the file that it was told."""

import contextlib
import os
from pathlib import Path
from typing import Any

import click
import msgspec
from typing_extensions import override


class OutputFile(click.Path):
    """A file that is written when the work is done: where that cannot be, it is refused before the work begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        there = next(above for above in path.absolute().parents if above.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            self.fail(f"cannot write {path}: {there} is no directory that can be written to", param, ctx)
        return path


OUTPUT_FILE = OutputFile()


def write_json(path: Path, found: object) -> None:
    """As `write_file`."""
    write_file(path, json_of(found))


def json_of(found: object) -> bytes:
    """For people, too: indented."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def write_file(path: Path, content: bytes) -> None:
    """Makes the directory as well. Raises click.ClickException."""
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}"
        raise click.ClickException(msg) from error
