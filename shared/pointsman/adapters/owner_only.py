"""Directories and files that only their owner may use: logs, archives, locks and secrets of a fleet."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

OWNER_ONLY = 0o600
OWNER_ONLY_DIRECTORY = 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def create_owner_only() -> None:
    """From now on, what this process and its children create is their owner's alone."""
    os.umask(_OTHERS)


def make_owner_only(directory: Path) -> bool:
    """Create the directory, or take it and the files in it from everybody else. Returns whether others had access.
    Raises OSError, also for a directory of another user."""
    directory.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    open_to_others = False
    for path in (directory, *_within(directory)):
        if not path.is_symlink():
            open_to_others |= tighten(path)
    return open_to_others


def tighten(path: Path) -> bool:
    """Take an existing file from everybody else. Returns whether others had access. Raises OSError."""
    mode = path.stat().st_mode
    if mode & _OTHERS:
        path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    return bool(mode & _OTHERS)


def write_whole(path: Path, content: bytes, *, mode: int = OWNER_ONLY, synced: bool = False) -> None:
    """Atomically; only the owner can read it unless `mode` says otherwise. `synced`: it survives a power cut. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


def is_open_to_others(path: Path) -> bool:
    """Raises OSError."""
    return bool(path.stat().st_mode & _OTHERS)


def _within(directory: Path) -> Iterator[Path]:
    """Files directly in it, and its directories: nobody reaches what is below a closed directory."""
    yield from (path for path in directory.iterdir() if not path.is_socket())
