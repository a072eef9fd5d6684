"""The archive of all log entries, in SQL. In: batches of rows. Out: stored in one transaction; storing again changes
nothing. Each step with the database is bounded."""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pointsman.adapters.owner_only import OWNER_ONLY, OWNER_ONLY_DIRECTORY, tighten
from pointsman.primitives import Sequence
from pointsman_recorder.database_errors import RefusedError, SetBackError, is_about_a_lost_table, is_about_data
from pointsman_recorder.preparing import prepare
from pointsman_recorder.schema import ENTRY_TABLES, dead_letters, events, gaps, logs, requests_view

log = structlog.get_logger()
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
WAL_BYTES_KEPT = 64 * 1024**2
WAL_BYTES_MAX = 1024**3
"""And at most what is free on the volume, since its pages still have to go into the file. A reader holds it back as long as its
statement runs; without a bound it would fill the volume, and then no statement can make room."""
STEP_SECONDS_MAX = 60.0
"""A connection is used no longer than this at once. A batch of writes to a busy disk takes seconds; a server whose host
vanished closes no connection and would be waited for without end."""
CLOSE_SECONDS_MAX = 2.0
SQLSTATE_READ_ONLY = "25006"
LATE = "late"
"""An event of each SQLite connection: what it runs ends early."""
LATE_LOOK_STEPS = 1000
"""Instructions of SQLite."""


@dataclass(frozen=True, slots=True)
class Branch:
    """An unbroken history. `tail`: the payload at `last`."""

    identity: str
    number: int
    last: Sequence = 0
    tail: bytes | None = None

    @property
    def log(self) -> str:
        return self.identity if self.number == 1 else f"{self.identity}#{self.number}"


Row = dict[str, Any]


@dataclass(slots=True)
class Batch:
    logs: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    dead_letters: list[Row] = field(default_factory=list)
    gaps: list[Row] = field(default_factory=list)


class Archive:
    """Methods raise DATABASE_ERRORS if the database does not answer, within STEP_SECONDS_MAX."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.prepared = asyncio.Event()
        self.followed = ""
        """The log that is recorded. Not always the one of the newest stream: a store may have been restored."""
        self._file: tuple[int, int] | None = None
        """Which file of SQLite was prepared."""

    async def prepare(self) -> None:
        """Raises UnusableDatabaseError."""
        await self._check_wal()
        view = requests_view(self.engine.dialect)
        async with self.writing() as connection:
            await prepare(connection, view)
        self._file = self._file or self._file_now()
        self.prepared.set()

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection for STEP_SECONDS_MAX."""
        return self._bounded(self.engine.connect())

    def writing(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction for STEP_SECONDS_MAX."""
        return self._bounded(self.engine.begin())

    def _bounded(
        self, connecting: AbstractAsyncContextManager[AsyncConnection]
    ) -> AbstractAsyncContextManager[AsyncConnection]:
        if self.engine.dialect.name != "sqlite":
            return _bounded(connecting)
        self._check_file()
        return _bounded_sqlite(connecting)

    def _check_file(self) -> None:
        """SQLite would go on with one that was deleted or replaced, and mix up both. Raises OSError."""
        if self._file is not None and self._file != self._file_now():
            file = self.engine.url.database
            raise OSError(
                f"{file} was deleted or replaced: stop the recorder, delete {file}-wal and {file}-shm, start it again"
            )

    def _file_now(self) -> tuple[int, int] | None:
        """None: there is none, as for a database in memory."""
        try:
            found = Path(str(self.engine.url.database)).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    async def latest_branch(self, identity: str) -> Branch | None:
        newest = sa.select(sa.func.max(logs.c.branch)).where(logs.c.identity == identity)
        async with self.reading() as connection:
            number = (await connection.execute(newest)).scalar()
            if number is None:
                return None
            return await _with_tail(connection, Branch(identity, number))

    async def newest_numbers(self) -> dict[str, int]:
        """Of the branches of each identity."""
        newest = sa.select(logs.c.identity, sa.func.max(logs.c.branch).label("number")).group_by(logs.c.identity)
        async with self.reading() as connection:
            return {row.identity: row.number for row in await connection.execute(newest)}

    async def store(self, batch: Batch, after: Branch | None = None) -> None:
        """All or nothing. `after`: what was stored before. Raises RefusedError, and SetBackError if that is gone."""
        await self._check_wal()
        try:
            await self._store(batch, after)
        except DBAPIError as error:
            if is_about_data(error):
                raise RefusedError(str(error.orig)) from error
            if is_about_a_lost_table(error):
                raise SetBackError(f"the archive has lost a table: {error.orig}") from error
            raise

    def wal_bytes(self) -> int:
        """Of SQLite's write-ahead log. Raises OSError."""
        file = Path(str(self.engine.url.database))
        wal = file.with_name(file.name + "-wal")
        return wal.stat().st_size if self.engine.dialect.name == "sqlite" and wal.exists() else 0

    async def _check_wal(self) -> None:
        """Raises OSError while a reader holds it back beyond WAL_BYTES_MAX."""
        if not self._wal_is_beyond():
            return
        async with self.reading() as connection:
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        if self._wal_is_beyond():
            raise OSError(
                f"a reader holds the write-ahead log back ({self.wal_bytes() / 1024**2:,.0f} MiB): end it, the log keeps the entries"
            )

    def _wal_is_beyond(self) -> bool:
        size = self.wal_bytes()
        if size == 0:
            return False
        free = shutil.disk_usage(Path(str(self.engine.url.database)).parent).free
        return size > min(WAL_BYTES_MAX, free)

    async def _store(self, batch: Batch, after: Branch | None) -> None:
        async with self.writing() as connection:
            if after is not None and not await _has(connection, after):
                raise SetBackError(f"the archive has lost entry {after.last} of {after.log}, which it had stored")
            for row in batch.logs:
                await _insert_missing(connection, logs, [row], logs.c.log == row["log"], "log")
            for table, rows in ((events, batch.events), (dead_letters, batch.dead_letters), (gaps, batch.gaps)):
                for log, of_log in _by_log(rows).items():
                    sequences = [row["sequence"] for row in of_log]
                    same = (table.c.log == log) & table.c.sequence.between(min(sequences), max(sequences))
                    await _insert_missing(connection, table, of_log, same, "sequence")
        for row in (batch.logs or batch.events or batch.dead_letters)[-1:]:
            self.followed = row["log"]


@asynccontextmanager
async def open_archive(url: str) -> AsyncIterator[Archive]:
    """Connects when used. Its end ends what SQLite runs. Raises click.BadParameter for a URL without an installed async
    driver."""
    try:
        parsed = make_url(url)
        engine = create_async_engine(parsed, pool_pre_ping=True)
    except (SQLAlchemyError, ImportError, ValueError) as error:  # ValueError: a port that is no number
        msg = f"{error}; write for instance sqlite+aiosqlite:///archive.sqlite"
        raise click.BadParameter(msg, param_hint="--archive-url") from error
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        with contextlib.suppress(OSError):  # then opening the file says what is wrong
            _keep_to_owner(Path(str(parsed.database)))
    ended = threading.Event()
    if engine.dialect.name == "sqlite":
        sa.event.listen(
            engine.sync_engine, "connect", lambda connection, record: _share_sqlite(connection, record, ended)
        )
    else:
        sa.event.listen(engine.sync_engine, "handle_error", _leave_if_read_only)
    try:
        yield Archive(engine)
    finally:
        ended.set()
        with contextlib.suppress(TimeoutError):  # a vanished server confirms no end
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await engine.dispose()


@asynccontextmanager
async def _bounded(connecting: AbstractAsyncContextManager[AsyncConnection]) -> AsyncIterator[AsyncConnection]:
    """Raises TimeoutError, which is an OSError."""
    bound = asyncio.timeout(STEP_SECONDS_MAX)
    try:
        async with bound, connecting as connection:
            yield connection
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise _too_late() from error


@asynccontextmanager
async def _bounded_sqlite(connecting: AbstractAsyncContextManager[AsyncConnection]) -> AsyncIterator[AsyncConnection]:
    """Ends the statement, not the step: a cancelled step leaves a cursor behind, and with it the lock on the file. While the
    disk hangs it waits. Raises TimeoutError."""
    async with connecting as connection:
        late: threading.Event = connection.info[LATE]
        timer = asyncio.get_running_loop().call_later(STEP_SECONDS_MAX, late.set)
        try:
            yield connection
        except (OperationalError, sqlite3.OperationalError) as error:
            if not late.is_set():
                raise
            raise _too_late() from error
        finally:
            timer.cancel()
            late.clear()


def _too_late() -> TimeoutError:
    return TimeoutError(f"the database did not answer within {STEP_SECONDS_MAX:g} s")


def _keep_to_owner(file: Path) -> None:
    """Raises OSError."""
    file.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    file.touch(mode=OWNER_ONLY)  # SQLite gives its other files the same mode
    for part in (file, *(file.with_name(file.name + suffix) for suffix in SQLITE_SUFFIXES)):
        if part.exists() and tighten(part):
            log.warning("archive_was_readable_by_others", file=str(part), note="its mode is 0600 now")


def _share_sqlite(connection: Any, record: Any, ended: threading.Event) -> None:
    late = record.info[LATE] = threading.Event()
    connection.run_async(
        lambda driver: driver.set_progress_handler(lambda: late.is_set() or ended.is_set(), LATE_LOOK_STEPS)
    )
    cursor = connection.cursor()
    cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a file without tables; others keep what they are
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


def _leave_if_read_only(context: sa.ExceptionContext) -> None:
    """The address may lead to a primary by now, and the connection stays with the server that is none."""
    if getattr(context.original_exception, "sqlstate", "") == SQLSTATE_READ_ONLY:
        context.is_disconnect = True


async def _has(connection: AsyncConnection, branch: Branch) -> bool:
    """Whether it is there up to its last entry."""
    kept = [sa.exists().where(table.c.log == branch.log, table.c.sequence == branch.last) for table in ENTRY_TABLES]
    if not branch.last:
        kept = [sa.exists().where(logs.c.log == branch.log)]
    return bool((await connection.execute(sa.select(sa.or_(*kept)))).scalar())


async def _with_tail(connection: AsyncConnection, branch: Branch) -> Branch:
    for table in ENTRY_TABLES:
        newest = (
            sa.select(table.c.sequence, table.c.payload)
            .where(table.c.log == branch.log, table.c.sequence > branch.last)
            .order_by(table.c.sequence.desc())
            .limit(1)
        )
        found = (await connection.execute(newest)).first()
        if found is not None:
            payload = found.payload if isinstance(found.payload, bytes) else found.payload.encode()
            branch = Branch(branch.identity, branch.number, found.sequence, payload)
    return branch


def _by_log(rows: list[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row["log"], []).append(row)
    return grouped


async def _insert_missing(
    connection: AsyncConnection, table: sa.Table, rows: list[Row], same: sa.ColumnElement[bool], key: str
) -> None:
    known = set((await connection.execute(sa.select(table.c[key]).where(same))).scalars())
    missing = list({row[key]: row for row in rows if row[key] not in known}.values())
    if missing:
        await connection.execute(sa.insert(table), missing)
