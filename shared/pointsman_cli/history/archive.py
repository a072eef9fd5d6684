"""Reads the recorder's SQL archive (docs/data.md). A stream that lost its tail and continued is a log of its own
(`...#2`); entries before the fork are read from its predecessor. An SQLite file may be a stranger's: it must have plain
tables with our keys, and its values, their sum and the work to read them are bounded."""

import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Select,
    TableClause,
    column,
    create_engine,
    event,
    func,
    select,
    table,
    union_all,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from typing_extensions import override

from pointsman.contracts.codec import PAYLOAD_BYTES_MAX, short_reason
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence
from pointsman_cli.formatting import plural
from pointsman_cli.history.entries import SUBJECT_LENGTH_MAX, Header, History, HistoryError

BATCH_ENTRIES = 2000
BATCH_BYTES = 16 * 1024**2
VALUE_BYTES_MAX = 2 * PAYLOAD_BYTES_MAX
SEQUENCE_MAX = 2**62
WORK_MIN = 10**6
WORK_STEP = 10_000
"""Instructions of SQLite for one statement: at most one a byte of the file, and as many more. Reading an entry takes about
twenty, and it has more than a hundred bytes. Damaged or forged pages may refer to each other without end."""
COMPUTED_COLUMNS = "SELECT count(*) FROM pragma_table_xinfo(?) WHERE hidden > 0"

INTERRUPTED = "interrupted"
"""What SQLite says of a statement that took too much work."""
LARGER = "its values are larger than the file, so it is not an archive of ours"
WITHOUT_KEYS = "its tables have no keys, so it is not an archive of ours"

_logs = table("logs", column("log"), column("identity"), column("branch"))
_columns = ("log", "sequence", "subject", "payload")
_events = table("events", *(column(name) for name in (*_columns, "at")))
_dead_letters = table("dead_letters", *(column(name) for name in _columns))
_gaps = table("gaps", *(column(name) for name in ("log", "sequence", "after_log", "after_sequence", "reason")))


@dataclass(frozen=True, slots=True)
class _Part:
    log: str
    last: Sequence


class ArchiveHistory(History):
    """One archived log, by default the newest. Raises HistoryError."""

    is_seekable = True

    def __init__(self, url: str, *, log: str | None = None) -> None:
        self._url = _parsed(url)
        self.origin = f"the archive {_shown(self._url)}"
        found: dict[str, Any] = {}
        for name, (statement, kinds) in _catalogue().items():
            found[name] = [tuple(row) for batch in self._rows(statement) for row in batch]
            if not all(all(type(value) is kind for value, kind in zip(row, kinds, strict=True)) for row in found[name]):
                self._refuse(f"{name} that the recorder does not write")
        by_age = sorted(found["logs"], key=itemgetter(3, 1, 2))
        chosen = self._chosen([row[0] for row in by_age], log)
        self.origin += f" (log {chosen})"
        if log is None and len(by_age) > 1:
            self.others = (
                f"the archive has {plural(len(by_age) - 1, 'other log')}, the one before is {by_age[-2][0]} (--pool)"
            )
        self._parts = _parts(chosen, found["gaps"], self._first_of)
        first, last, entries, subject = self._extent()
        self.header = Header(
            pool=subject.partition(".")[2].partition(".")[0], identity=chosen, first=first, last=last, entries=entries
        )
        self._recorded_from_there = any(gap[:2] == (part.log, first) for gap in found["gaps"] for part in self._parts)
        within = {part.log: part.last for part in self._parts}
        self.holes = tuple(
            f"entries {before + 1:,} to {sequence - 1:,} are missing: {short_reason(reason)}"
            for log, sequence, after, before, reason in sorted(found["gaps"], key=itemgetter(1))
            if log == after and first <= before < sequence - 1 < within.get(log, 0)
        )

    @property
    @override
    def begins(self) -> str:
        if self.header.first <= 1:
            return super().begins
        why = "nothing earlier was archived" if self._recorded_from_there else "its retention removed what came before"
        return f"the archive begins at entry {self.header.first:,} ({why})"

    @override
    def entries(self, start: Sequence = 1) -> Generator[LogEntry, None, None]:
        for part in self._parts:
            last = min(part.last, self.header.last)
            kept = (self._kept_in(name, part.log, start, last) for name in (_events, _dead_letters))
            yield from merge(*kept, key=attrgetter("sequence"))

    def _kept_in(self, where: TableClause, log: str, start: Sequence, last: Sequence) -> Iterator[LogEntry]:
        columns = where.c
        statement = (
            select(columns.sequence, columns.subject, columns.payload)
            .where(columns.log == log, columns.sequence.between(start, last))
            .order_by(columns.sequence)
        )
        for batch in self._rows(statement, columns.sequence):
            for sequence, subject, payload in batch:
                if type(sequence) is not int or type(subject) is not str or len(subject) > SUBJECT_LENGTH_MAX:
                    self._refuse("an entry without a number or subject")
                yield LogEntry.read(sequence, subject, payload if isinstance(payload, bytes) else str(payload).encode())

    def _chosen(self, known: list[str], requested: str | None) -> str:
        if requested is not None and requested not in known:
            raise HistoryError(f"{self.origin} has no log {requested}; it has: {', '.join(known) or 'none'}")
        if not known:
            raise HistoryError(f"{self.origin} holds no log: the recorder has written nothing into it yet")
        return requested or known[-1]

    def _refuse(self, what: str) -> NoReturn:
        raise HistoryError(f"{self.origin} has {what}: it is not an archive of ours")

    def _extent(self) -> tuple[Sequence, Sequence, int, str]:
        first, last, entries, subject = 0, 0, 0, ""
        for part in self._parts:
            low, high, count, any_subject = self._extent_of(part)
            if count:
                first, last, entries, subject = first or low, max(last, high), entries + count, any_subject
        return first, last, entries, subject

    def _extent_of(self, part: _Part) -> tuple[Sequence, Sequence, int, str]:
        ((low, high, count, subject),) = (tuple(row) for batch in self._rows(_extent_of(part)) for row in batch)
        if not count:
            return 0, 0, 0, ""
        if not all(type(number) is int for number in (low, high, count)):
            self._refuse("an entry without a number")
        return low, high, count, str(subject)[:SUBJECT_LENGTH_MAX]

    def _first_of(self, log: str) -> Sequence:
        """0 without entries."""
        firsts = [first for batch in self._rows(_firsts_of(log)) for (first,) in batch if first is not None]
        if not all(type(first) is int for first in firsts):
            self._refuse("an entry without a number")
        return min(firsts, default=0)

    def _rows(self, statement: Select[Any], key: ColumnElement[int] | None = None) -> Iterator[list[Any]]:
        """Rows in batches. `key`: the first column, by which they are ordered. Raises HistoryError."""
        try:
            if _is_sqlite(self._url):
                yield from _rows_of_sqlite(self._url, statement, key)
            else:
                yield from self._read_in_loop(_batches(self._url, statement))
        except (SQLAlchemyError, OSError) as error:
            reason = str(getattr(error, "orig", None) or error)
            if reason == INTERRUPTED:
                self._refuse("more entries than fit its size")
            raise HistoryError(f"{self.origin} cannot be read: {reason}") from error


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise HistoryError(
            f"{url} is not an SQLAlchemy URL, such as sqlite:///archive.sqlite or postgresql+asyncpg://user@host/db"
        ) from error
    return _read_only(parsed) if _is_sqlite(parsed) else parsed


def _read_only(url: URL) -> URL:
    file = Path(url.database or "").absolute()
    if not file.is_file():
        raise HistoryError(
            f"there is no archive {file}; `pointsman up` keeps one in its data directory, as archive.sqlite"
        )
    return URL.create("sqlite", database=f"file:{quote(str(file))}", query={"mode": "ro", "uri": "true"})


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _catalogue() -> dict[str, tuple[Select[Any], tuple[type, ...]]]:
    """Statements, and the types of their columns."""
    newest = select(_events.c.at).where(_events.c.log == _logs.c.log).order_by(_events.c.sequence.desc()).limit(1)
    logs = select(_logs.c.log, _logs.c.identity, _logs.c.branch, func.coalesce(newest.scalar_subquery(), 0.0))
    forks = select(*_gaps.c)
    return {"logs": (logs, (str, str, int, float)), "gaps": (forks, (str, int, str, int, str))}


def _shown(url: URL) -> str:
    if _is_sqlite(url):
        return unquote(str(url.database)).removeprefix("file:")
    return url.render_as_string(hide_password=True)


def _parts(
    chosen: str, gaps: list[tuple[str, Sequence, str, Sequence, str]], first_of: Callable[[str], Sequence]
) -> list[_Part]:
    """The log, preceded by those of the same stream that it continues."""
    parts = [_Part(chosen, SEQUENCE_MAX)]
    while (first := first_of(parts[0].log)) > 1:
        before = next((after for log, _, after, *_ in gaps if log == parts[0].log and after != log), "")
        known = {part.log for part in parts}
        if not before or before in known or _stream(before) != _stream(chosen):
            break
        parts.insert(0, _Part(before, first - 1))
    return parts


def _stream(log: str) -> str:
    return log.partition("#")[0]


def _firsts_of(log: str) -> Select[Any]:
    """Of each table, by its key: `_extent_of` reads the whole log."""
    firsts = (select(func.min(kept.c.sequence)).where(kept.c.log == log) for kept in (_events, _dead_letters))
    return select(union_all(*firsts).subquery())


def _extent_of(part: _Part) -> Select[Any]:
    both = union_all(
        *(
            select(kept.c.sequence, kept.c.subject).where(kept.c.log == part.log, kept.c.sequence <= part.last)
            for kept in (_events, _dead_letters)
        )
    ).subquery()
    first, last = func.min(both.c.sequence), func.max(both.c.sequence)
    extent: Select[Any] = select(first, last, func.count(both.c.sequence), func.max(both.c.subject))  # type: ignore[assignment]
    return extent


def _rows_of_sqlite(url: URL, statement: Select[Any], key: ColumnElement[int] | None) -> Iterator[list[Any]]:
    """With a key each batch is a statement of its own: one that stays open keeps SQLite from moving what its recorder writes
    into the file."""
    engine: Engine = create_engine(url)
    left = _bytes_of(Path(_shown(url)))
    event.listen(engine, "connect", partial(_bound_sqlite, left))
    try:
        connection: Connection
        with engine.connect() as connection:
            _check_tables(connection)
            _check_keys(connection, statement)
            reading = connection.execute(statement)
            while batch := _next_batch(reading, left):
                left -= sum(map(_bytes_in, batch))
                if key is not None:
                    reading.close()
                yield batch
                if key is not None:
                    reading = connection.execute(statement.where(key > batch[-1][0]))
    finally:
        engine.dispose()


def _next_batch(reading: CursorResult[Any], bytes_max: int) -> list[Any]:
    """Raises OSError."""
    batch: list[Any] = []
    size = 0
    while len(batch) < BATCH_ENTRIES and size <= BATCH_BYTES and (row := reading.fetchone()) is not None:
        batch.append(tuple(row))
        size += _bytes_in(batch[-1])
        if size > bytes_max:
            raise OSError(LARGER)
    return batch


def _bytes_in(row: tuple[Any, ...]) -> int:
    return sum(len(value) for value in row if isinstance(value, str | bytes))


def _bytes_of(file: Path) -> int:
    """Of the archive with what its recorder has not moved into it yet. Raises OSError."""
    journal = Path(f"{file}-wal")
    return file.stat().st_size + (journal.stat().st_size if journal.is_file() else 0)


def _bound_sqlite(size: int, connection: sqlite3.Connection, _record: object) -> None:
    steps = iter(range((WORK_MIN + size) // WORK_STEP))
    connection.set_progress_handler(lambda: next(steps, None) is None, WORK_STEP)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES_MAX)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")


def _check_tables(connection: Connection) -> None:
    """A view or virtual table may compute without end. Raises OSError."""
    schema = table("sqlite_master", column("name"), column("type"), column("rootpage"))
    stored = select(schema.c.name).where(schema.c.type == "table", schema.c.rootpage > 0)
    plain = set(connection.execute(stored).scalars())
    for name in (kept.name for kept in (_logs, _events, _dead_letters, _gaps)):
        if name not in plain or connection.exec_driver_sql(COMPUTED_COLUMNS, (name,)).scalar():
            raise OSError(f"it has no plain table '{name}', so it is not an archive of ours")


def _check_keys(connection: Connection, statement: Select[Any]) -> None:
    """Without our keys, SQLite sorts in a temporary file. Raises OSError."""
    compiled = statement.compile(connection, compile_kwargs={"literal_binds": True})
    plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}")
    if any("TEMP B-TREE" in step.detail for step in plan):
        raise OSError(WITHOUT_KEYS)


async def _batches(url: URL, statement: Select[Any]) -> AsyncGenerator[list[Any], None]:
    try:
        engine = create_async_engine(url)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise HistoryError(
            f"{url.drivername}: {error}; name an asynchronous driver that is installed, as for the recorder"
        ) from error
    try:
        async with engine.connect() as connection:
            result = await connection.stream(statement, execution_options={"yield_per": BATCH_ENTRIES})
            async for batch in result.partitions():
                yield [tuple(row) for row in batch]
    finally:
        await engine.dispose()
