"""Bounds the log files of the fleet's processes while it runs. A supervisor of the scaler's bounds those of its instance."""

import asyncio
import contextlib
from pathlib import Path

from pointsman.adapters.log_files import cut_if_large

CHECK_SECONDS = 5.0
LOGS = "*.log"


async def bound_logs(directory: Path) -> None:
    """Runs without end."""
    while True:
        _bound(directory)
        await asyncio.sleep(CHECK_SECONDS)


def _bound(directory: Path) -> None:
    for file in directory.glob(LOGS):
        with contextlib.suppress(OSError):
            cut_if_large(file)
