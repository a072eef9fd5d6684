"""Log files that child processes append to: their end, and their bound. What is too large is cut to nothing, and its end
is kept beside it, as NAME.log.1. Lines written at that moment are lost."""

from pathlib import Path

LOG_BYTES_MAX = 64 * 1024**2
KEPT_BYTES = 8 * 1024**2
END_BYTES = 16_384


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


def log_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def log_end(file: Path, since: int = 0) -> list[str]:
    """Whole or partial lines of the last END_BYTES, not before byte `since` unless the file was shortened."""
    try:
        with file.open("rb") as log:
            size = file.stat().st_size
            log.seek(max(since if since <= size else 0, size - END_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_line(file: Path, since: int = 0) -> str:
    """Of those that are not empty; "" if there is none."""
    return next((line.strip() for line in reversed(log_end(file, since)) if line.strip()), "")
