"""Advisory file locks (flock). `filelock` cannot hand a lock to a child process."""

import fcntl
from pathlib import Path
from typing import IO


def try_lock(file: IO[bytes] | int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(file: IO[bytes] | int) -> None:
    """Blocks without bound."""
    fcntl.flock(file, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
