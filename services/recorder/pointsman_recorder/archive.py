"""The archive's SQL: tables of all log entries, and a view with a row per request. Storing again changes nothing. A
*log* here is one unbroken history: the stream's identity, with `#2`, `#3`... after the log went back and reused
sequences."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pointsman.adapters.owner_only import OWNER_ONLY, OWNER_ONLY_DIRECTORY, tighten
from pointsman.contracts.decisions import RequestEnd
from pointsman.primitives import Sequence

log = structlog.get_logger()
SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
WAL_BYTES_KEPT = 64 * 1024**2
DATABASE_ERRORS = (SQLAlchemyError, sqlite3.Error, OSError)
"""What a database raises that does not answer. SQLAlchemy translates no errors of a driver that is used directly."""
STEP_SECONDS_MAX = 60.0
"""A connection is used no longer than this at once. A batch of writes to a busy disk takes seconds; a server whose host
vanished closes no connection and would be waited for without end."""
CLOSE_SECONDS_MAX = 2.0
VACUUM_EARLY = "autovacuum_vacuum_scale_factor=0.02"
"""The space of deleted rows is used again after 2% of the rows, not after 20%."""
SQLSTATE_OTHER_COLUMNS = "42P16"
"""A view has columns that its new definition lacks, or in another order."""
SQLSTATE_DEPENDENTS = "2BP01"
SQLSTATE_OF_DATA = "22"
"""Class of the errors about a value. Of asyncpg's errors SQLAlchemy makes no DataError."""
ORDINARY_NUMBER = "^-?[0-9]{1,31}(?:[.][0-9]{1,60})?(?:[eE][-+]?[0-9]{1,2})?$"
"""What `double precision` always holds. JSON may also say 1e-400, which the codec reads as 0 and PostgreSQL refuses."""
metadata = sa.MetaData()

logs = sa.Table(
    "logs",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True, comment="name of one unbroken history"),
    sa.Column("identity", sa.String(80), nullable=False, comment="the stream's creation time"),
    sa.Column("branch", sa.Integer, nullable=False, comment="1, and one more each time the stream went back"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Float(53), nullable=False, comment="engine seconds since the Unix epoch"),
    sa.Column("type", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("instance", sa.String(64)),
    sa.Column("request", sa.String(64)),
    sa.Column("payload", sa.Text, nullable=False, comment="the event as JSON, as it was in the log"),
    sa.Index("events_by_request", "request"),
    sa.Index("events_by_type", "type", "at"),
    sa.Index("events_by_instance", "instance", "at"),
)

dead_letters = sa.Table(
    "dead_letters",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
)

gaps = sa.Table(
    "gaps",
    metadata,
    sa.Column("log", sa.String(96), primary_key=True, comment="the history that goes on at `sequence`"),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("after_log", sa.String(96), nullable=False),
    sa.Column("after_sequence", sa.BigInteger, nullable=False, comment="last entry archived before; 0 for none"),
    sa.Column("reason", sa.Text, nullable=False),
)

ENTRY_TABLES = (events, dead_letters)
"""Each entry is in one of them."""
ENDS = tuple(end.__name__ for end in get_args(RequestEnd))


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


class UnusableDatabaseError(Exception):
    """No archive can be in this database. The message says what to do."""


class RefusedError(Exception):
    """The database answers, and refuses a value, now and always."""


class Archive:
    """Methods raise DATABASE_ERRORS if the database does not answer, within STEP_SECONDS_MAX."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.prepared = asyncio.Event()

    async def prepare(self) -> None:
        """Raises UnusableDatabaseError."""
        dialect = self.engine.dialect
        view = f"VIEW requests AS {requests(dialect).compile(dialect=dialect, compile_kwargs={'literal_binds': True})}"
        async with self.writing() as connection:
            if dialect.name == "postgresql":
                await _check_encoding(connection)
            await connection.run_sync(metadata.create_all)
            if dialect.name == "postgresql":
                await _replace_view(connection, view)
                await _vacuum_early(connection)
            else:
                await _create_view(connection, view)
        self.prepared.set()

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection for STEP_SECONDS_MAX."""
        return _bounded(self.engine.connect())

    def writing(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction for STEP_SECONDS_MAX."""
        return _bounded(self.engine.begin())

    async def latest_branch(self, identity: str) -> Branch | None:
        newest = sa.select(sa.func.max(logs.c.branch)).where(logs.c.identity == identity)
        async with self.reading() as connection:
            number = (await connection.execute(newest)).scalar()
            if number is None:
                return None
            return await _with_tail(connection, Branch(identity, number))

    async def store(self, batch: Batch) -> None:
        """All or nothing. Raises RefusedError."""
        try:
            await self._store(batch)
        except DBAPIError as error:
            if _is_about_data(error):
                raise RefusedError(str(error.orig)) from error
            raise

    async def _store(self, batch: Batch) -> None:
        async with self.writing() as connection:
            for row in batch.logs:
                await _insert_missing(connection, logs, [row], logs.c.log == row["log"], "log")
            for table, rows in ((events, batch.events), (dead_letters, batch.dead_letters), (gaps, batch.gaps)):
                for log, of_log in _by_log(rows).items():
                    sequences = [row["sequence"] for row in of_log]
                    same = (table.c.log == log) & table.c.sequence.between(min(sequences), max(sequences))
                    await _insert_missing(connection, table, of_log, same, "sequence")


@asynccontextmanager
async def open_archive(url: str) -> AsyncIterator[Archive]:
    """Connects when used. Raises click.BadParameter for a URL without an installed async driver."""
    try:
        parsed = make_url(url)
        engine = create_async_engine(parsed, pool_pre_ping=True)
    except (SQLAlchemyError, ImportError, ValueError) as error:  # ValueError: a port that is no number
        msg = f"{error}; write for instance sqlite+aiosqlite:///archive.sqlite"
        raise click.BadParameter(msg, param_hint="--archive-url") from error
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        with contextlib.suppress(OSError):  # then opening the file says what is wrong
            _keep_to_owner(Path(str(parsed.database)))
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine.sync_engine, "connect", _share_sqlite)
    try:
        yield Archive(engine)
    finally:
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
        msg = f"the database did not answer within {STEP_SECONDS_MAX:g} s"
        raise TimeoutError(msg) from error


def _keep_to_owner(file: Path) -> None:
    """Raises OSError."""
    file.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
    file.touch(mode=OWNER_ONLY)  # SQLite gives its other files the same mode
    for part in (file, *(file.with_name(file.name + suffix) for suffix in SQLITE_SUFFIXES)):
        if part.exists() and tighten(part):
            log.warning("archive_was_readable_by_others", file=str(part), note="its mode is 0600 now")


def _share_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a file without tables; others keep what they are
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


def _is_about_data(error: DBAPIError) -> bool:
    return isinstance(error, DataError) or _sqlstate(error).startswith(SQLSTATE_OF_DATA)


def _sqlstate(error: DBAPIError) -> str:
    """Empty for SQLite."""
    return str(getattr(error.orig, "sqlstate", ""))


async def _create_view(connection: AsyncConnection, view: str) -> None:
    await connection.execute(sa.text("DROP VIEW IF EXISTS requests"))
    await connection.execute(sa.text(f"CREATE {view}"))


async def _replace_view(connection: AsyncConnection, view: str) -> None:
    """Keeps the grants on the view and the views that depend on it, unless its columns are others. Raises
    UnusableDatabaseError."""
    try:
        async with connection.begin_nested():
            await connection.execute(sa.text(f"CREATE OR REPLACE {view}"))
    except DBAPIError as error:
        if _sqlstate(error) != SQLSTATE_OTHER_COLUMNS:
            raise
        await _create_other_columns(connection, view)


async def _create_other_columns(connection: AsyncConnection, view: str) -> None:
    try:
        await _create_view(connection, view)
    except DBAPIError as error:
        if _sqlstate(error) != SQLSTATE_DEPENDENTS:
            raise
        dependents = " ".join(str(getattr(getattr(error.orig, "__cause__", None), "detail", "")).split())  # of asyncpg
        msg = (
            f"the view requests has other columns in this version, and others depend on it ({dependents or error.orig}): "
            "drop those, and create them again when the recorder is ready"
        )
        raise UnusableDatabaseError(msg) from error
    log.warning("archive_view_replaced", view="requests", note="its columns are others now: grant access to it again")


async def _check_encoding(connection: AsyncConnection) -> None:
    """Another encoding lacks characters that tenants and reasons may have. Raises UnusableDatabaseError."""
    encoding = (await connection.execute(sa.text("SHOW server_encoding"))).scalar()
    if encoding != "UTF8":
        msg = f"the database has encoding {encoding}; create one with ENCODING 'UTF8' and name it in --archive-url"
        raise UnusableDatabaseError(msg)


async def _vacuum_early(connection: AsyncConnection) -> None:
    options = sa.text(
        "SELECT coalesce(array_to_string(reloptions, ','), '') FROM pg_class WHERE oid = to_regclass(:name)"
    )
    for table in ENTRY_TABLES:
        if VACUUM_EARLY not in ((await connection.execute(options, {"name": table.name})).scalar() or ""):
            await connection.execute(sa.text(f"ALTER TABLE {table.name} SET ({VACUUM_EARLY})"))


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


def requests(dialect: sa.Dialect) -> sa.Select[Any]:
    """One row per request and log: request, placement, end. `ends` is 1 in a healthy log."""

    def word(kind: str, name: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type == kind, _payload(dialect)[name].as_string())))

    def number(kind: str, name: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type == kind, _number(dialect, name))))

    def at(*kinds: str) -> sa.ColumnElement[Any]:
        return sa.func.max(sa.case((events.c.type.in_(kinds), events.c.at)))

    def count(*kinds: str) -> sa.ColumnElement[Any]:
        return sa.func.count(sa.case((events.c.type.in_(kinds), events.c.sequence)))

    return (
        sa.select(
            events.c.log,
            events.c.request,
            word("RequestArrived", "tenant").label("tenant"),
            number("RequestArrived", "arrived_at").label("arrived_at"),
            number("RequestArrived", "slo_ttft").label("slo_ttft"),
            number("RequestArrived", "prompt_tokens").label("prompt_tokens"),
            word("RequestPlaced", "policy").label("policy"),
            at("RequestPlaced").label("placed_at"),
            number("RequestPlaced", "predicted_ttft").label("predicted_ttft"),
            at("RequestGranted").label("granted_at"),
            word("RequestGranted", "instance").label("granted_instance"),
            word("RequestFinished", "instance").label("instance"),
            at("PrefillFinished").label("first_token_at"),
            number("PrefillFinished", "ttft").label("ttft"),
            number("RequestFinished", "tpot").label("tpot"),
            number("RequestFinished", "e2e").label("e2e"),
            number("RequestFinished", "cached_tokens").label("cached_tokens"),
            number("RequestFinished", "completion_tokens").label("completion_tokens"),
            sa.func.max(sa.case((events.c.type.in_(ENDS), events.c.type))).label("end_type"),
            at(*ENDS).label("ended_at"),
            count("RequestPlaced").label("placements"),
            count("RequestMigrated").label("migrations"),
            count(*ENDS).label("ends"),
        )
        .where(events.c.request.is_not(None))
        .group_by(events.c.log, events.c.request)
    )


def _payload(dialect: sa.Dialect) -> Any:
    """The payload as a JSON expression. In SQLite JSON is text, and a cast would make it a number."""
    return sa.type_coerce(events.c.payload, sa.JSON) if dialect.name == "sqlite" else sa.cast(events.c.payload, sa.JSON)


def _number(dialect: sa.Dialect, name: str) -> sa.ColumnElement[Any]:
    """In PostgreSQL NULL for what is no ORDINARY_NUMBER: one refused row would fail the view for everybody."""
    value = _payload(dialect)[name]
    if dialect.name == "postgresql":
        return sa.cast(sa.func.substring(value.as_string(), ORDINARY_NUMBER), sa.Float(53))
    number: sa.ColumnElement[Any] = value.as_float()
    return number
