"""Advisory locks on files (flock), which the kernel frees when the last process that holds the descriptor ends. `filelock` cannot
hand a lock over to a child process."""

import fcntl
from pathlib import Path
from typing import IO


def try_lock(file: IO[bytes] | int) -> bool:
    """Take the exclusive lock of an open file. False where another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(file: IO[bytes] | int) -> None:
    """Take the exclusive lock, however long that takes. Blocks."""
    fcntl.flock(file, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file. Raises OSError, but not where there is no such file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
