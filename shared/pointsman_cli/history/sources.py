"""Opens the log that `--from` names: a running fleet, the recorder's archive, an exported bundle, or `-`."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pointsman.contracts.codec import short_reason
from pointsman.runtime.settings import NATS_SCHEMES
from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.discovery import NoFleetError, fleet_settings, is_running
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.entries import Header, History, HistoryError
from pointsman_cli.history.live import LiveHistory

__all__ = ["Header", "History", "HistoryError", "open_history"]

SQLITE_MAGIC = b"SQLite format 3\0"
STANDARD_INPUT = "-"
STANDARD_INPUT_BYTES_MAX = 16 * 1024**3
CHUNK_BYTES = 1024**2
ARCHIVE_FILE = "archive.sqlite"


@contextmanager
def open_history(place: str | None = None, pool: str | None = None) -> Iterator[History]:
    """`pool`: of a fleet, or log of an archive. Raises HistoryError, NoFleetError, SeveralFleetsError. Whatever else is
    raised while a file is read becomes a HistoryError: nobody vouches for what is in it."""
    configure_logging("error", "text")
    with contextlib.ExitStack() as stack:
        if place == STANDARD_INPUT:
            history: History = BundleHistory(stack.enter_context(_standard_input()), origin="standard input")
        else:
            history = _opened(place, pool)
        stack.callback(history.close)
        try:
            yield history
        except (click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise
        except Exception as error:
            if isinstance(history, LiveHistory):
                raise
            raise HistoryError(
                f"{history.origin} has content that cannot be: {type(error).__name__}: {short_reason(error)}"
            ) from error


def is_live(place: str | None) -> bool:
    """Whether it names a fleet, running or not. A data directory whose fleet ended is its archive."""
    if place is None:
        return True
    scheme, is_url, _ = place.partition("://")
    if is_url:
        return scheme in NATS_SCHEMES
    path = Path(place)
    return path.is_dir() and (is_running(path) or not (path / ARCHIVE_FILE).is_file())


def _opened(place: str | None, pool: str | None) -> History:
    if place is None or is_live(place):
        return _live(place, pool)
    if "://" in place:
        return _archive(place, pool)
    path = Path(place)
    if path.is_dir():
        return _archive(f"sqlite:///{path / ARCHIVE_FILE}", pool)
    if not path.is_file():
        raise HistoryError(f"there is no file {place}; name an archive, an exported bundle, a data directory or a URL")
    if _begins_with(path, SQLITE_MAGIC):
        return _archive(f"sqlite:///{path}", pool)
    bundle = BundleHistory(path)
    known = bundle.header.pool
    if pool is not None and known and pool not in (known, bundle.header.identity):
        raise HistoryError(f"{place} is a log of the pool {known}, not of {pool}")
    return bundle


def _archive(url: str, log: str | None) -> History:
    from pointsman_cli.history.archive import ArchiveHistory  # SQLAlchemy, which no other source needs

    return ArchiveHistory(url, log=log)


def _live(place: str | None, pool: str | None) -> History:
    try:
        return LiveHistory(fleet_settings(place, pool))
    except NoFleetError as error:
        raise HistoryError(
            f"{error.message}; or name a recorded log: --from .pointsman/{ARCHIVE_FILE}, or an exported bundle"
        ) from error


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        raise HistoryError(f"{path} cannot be opened: {error.strerror}") from error


@contextmanager
def _standard_input() -> Iterator[Path]:
    """Copied into a file, since a log is read more than once."""
    with tempfile.NamedTemporaryFile(prefix="pointsman-") as kept:
        left = STANDARD_INPUT_BYTES_MAX
        while chunk := sys.stdin.buffer.read(CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise HistoryError(
                    f"standard input has more than {STANDARD_INPUT_BYTES_MAX / 1024**3:,.0f} GiB; name a file instead"
                )
            kept.write(chunk)
        kept.flush()
        yield Path(kept.name)
