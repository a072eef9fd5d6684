"""Where a log is read from: what people say on the command line, and what lies behind it.

Nothing said means the fleet that runs on this machine, as for `tap`. `--from` takes a file that is looked into (SQLite
archive or bundle), a data directory, a nats URL, a SQLAlchemy URL, or `-` for a bundle on standard input.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from pointsman_cli.discovery import NoFleetError, fleet_settings, is_running
from pointsman_cli.history.archive import ArchiveHistory
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.entries import Header, History
from pointsman_cli.history.errors import HistoryError
from pointsman_cli.history.live import LiveHistory
from pointsman_cli.options import which_fleet

__all__ = ["Header", "History", "HistoryError", "Source", "open_history", "source_options"]

SQLITE_MAGIC = b"SQLite format 3\0"
STANDARD_INPUT = "-"
NATS_SCHEMES = ("nats", "tls", "ws", "wss")
ARCHIVE_FILE = "archive.sqlite"


@dataclass(frozen=True, slots=True)
class Source:
    """What was said on the command line about where the log is."""

    place: str | None = None
    nats: str | None = None
    data: Path | None = None
    pool: str | None = None
    log: str | None = None

    @contextmanager
    def open(self) -> Iterator[History]:
        """The log. Raises HistoryError, NoFleetError, SeveralFleetsError: each says what to type."""
        with open_history(self.place, nats=self.nats, data=self.data, pool=self.pool, log=self.log) as history:
            yield history


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that say where the log is; it receives them as one `source: Source`."""

    @click.option(
        "--from",
        "place",
        metavar="WHERE",
        help="The recorder's archive (a file, or a SQLAlchemy URL), an exported bundle, a data directory, nats://..., "
        "or - for a bundle on standard input. Default: the log of the running fleet.",
    )
    @click.option("--log", metavar="NAME", help="Which log of an archive that holds several. Default: the newest.")
    @which_fleet
    @wraps(command)
    def with_source(
        place: str | None,
        log: str | None,
        nats: str | None,
        data: Path | None,
        pool: str | None,
        **others: Any,
    ) -> Any:
        if place is not None and (nats is not None or data is not None):
            msg = "--from says where the log is; --nats and --data are for the log of a running fleet"
            raise click.UsageError(msg)
        return command(source=Source(place, nats, data, pool, log), **others)

    return with_source


@contextmanager
def open_history(
    place: str | None = None,
    *,
    nats: str | None = None,
    data: Path | None = None,
    pool: str | None = None,
    log: str | None = None,
) -> Iterator[History]:
    """The log that is kept at `place`; without it, that of the running fleet. `log`: one of those in an archive.

    Raises HistoryError, NoFleetError, SeveralFleetsError.
    """
    if place == STANDARD_INPUT:
        with _standard_input() as file:
            yield BundleHistory(file, origin="standard input")
    else:
        yield _opened(place, nats, data, pool, log)


def _opened(place: str | None, nats: str | None, data: Path | None, pool: str | None, log: str | None) -> History:
    if place is None:
        return _of_fleet(nats, data, pool, log)
    scheme, is_url, _ = place.partition("://")
    if is_url:
        if scheme in NATS_SCHEMES:
            return LiveHistory(fleet_settings(place, None, pool))
        return ArchiveHistory(place, log=log)
    path = Path(place)
    if path.is_dir():
        return _of_fleet(None, path, pool, log)
    if not path.is_file():
        msg = f"there is no file {place}; name an archive, an exported bundle, a data directory or a URL"
        raise HistoryError(msg)
    if _begins_with(path, SQLITE_MAGIC):
        return ArchiveHistory(f"sqlite:///{path}", log=log)
    return BundleHistory(path)


def _of_fleet(nats: str | None, data: Path | None, pool: str | None, log: str | None) -> History:
    """The log of a fleet that runs; of one that does not, but whose data directory is named, its archive."""
    if data is not None and not is_running(data) and (data / ARCHIVE_FILE).is_file():
        return ArchiveHistory(f"sqlite:///{data / ARCHIVE_FILE}", log=log)
    try:
        return LiveHistory(fleet_settings(nats, data, pool))
    except NoFleetError as error:
        msg = f"{error.message}\nor name a log that was kept: --from .pointsman/{ARCHIVE_FILE}, or an exported bundle"
        raise HistoryError(msg) from error


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as error:
        msg = f"{path} cannot be opened: {error.strerror}"
        raise HistoryError(msg) from error


@contextmanager
def _standard_input() -> Iterator[Path]:
    """What comes in, kept in a file while it is needed: a log may be read more than once."""
    with tempfile.NamedTemporaryFile(prefix="pointsman-") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield Path(kept.name)
