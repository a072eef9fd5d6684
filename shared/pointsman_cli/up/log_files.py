"""Bounds the log files of child processes, which append to them: what is too large is cut to nothing, and its end is
kept beside it, as NAME.log.1. Lines written at that moment are lost."""

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

LOG_BYTES_MAX = 64 * 1024**2
KEPT_BYTES = 8 * 1024**2
CHECK_SECONDS = 5.0
LOGS = "*.log"


async def bound_logs(directories: Iterable[Path], *, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Runs without end."""
    directories = list(directories)
    while True:
        for directory in directories:
            for file in directory.glob(LOGS):
                with contextlib.suppress(OSError):
                    cut_if_large(file, bytes_max)
        await asyncio.sleep(CHECK_SECONDS)


def cut_if_large(file: Path, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Raises OSError."""
    size = file.stat().st_size
    if size <= bytes_max:
        return False
    with file.open("r+b") as log:
        log.seek(max(0, size - KEPT_BYTES))
        kept = log.read(KEPT_BYTES)
        file.with_name(file.name + ".1").write_bytes(kept)
        log.truncate(0)
    return True
