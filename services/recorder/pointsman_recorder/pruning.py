"""SQL of the archive's retention: what is oldest, how large it is, deleting it. Methods raise DATABASE_ERRORS.

SQLite: deleted pages are used again; what is free beyond FREE_SHARE goes back to the file system if the file was made
for that (`auto_vacuum`, archives since this version; others: once `VACUUM`). PostgreSQL: autovacuum makes the space
usable again, the files keep their size; the bytes in use are an estimate: number of rows (between the ends of a log,
without its gaps; at most what sampled pages hold) times the size of a sampled row."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from pointsman.primitives import EngineSeconds, Sequence
from pointsman_recorder.archive import WAL_BYTES_KEPT, Archive
from pointsman_recorder.schema import ENTRY_TABLES, dead_letters, events, gaps, logs

FREE_SHARE = 0.1
VACUUM_PAGES = 1000
INCREMENTAL = 2
SAMPLE_PAGES = 1000
PAGE_BYTES = 8192
ROW_OVERHEAD_BYTES = 330
"""Of PostgreSQL: header, other columns, four indexes of `events` (measured; a dead letter has one, and its reason)."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first entries of the oldest log. `at`: of the middle one, so that no single wrong time counts; None: unknown.
    `last`: whether nothing is left of the log behind it."""

    log: str
    upto: Sequence
    at: EngineSeconds | None
    last: bool


@dataclass(frozen=True, slots=True)
class Size:
    used: int
    disk: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Estimates for a table."""

    rows: float
    row_bytes: float


@dataclass(frozen=True, slots=True)
class Beginning:
    identity: str
    sequence: Sequence
    at: EngineSeconds


class Pruning:
    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._is_sqlite = archive.engine.dialect.name == "sqlite"

    @property
    def _by_age(self) -> tuple[sa.ColumnElement[Any], ...]:
        return logs.c.log == self._archive.followed, logs.c.identity, logs.c.branch

    async def head(self, rows_max: int) -> Head | None:
        """At most `rows_max` of each table. None: nothing may go now, or it is not known yet which log is recorded."""
        if not self._archive.followed:
            return None
        async with self._archive.reading() as connection:
            known = list((await connection.execute(sa.select(logs.c.log).order_by(*self._by_age))).scalars())
            for log in known:
                found = await _head_of(connection, log, rows_max, keeps_newest=log == known[-1])
                if found is not None:
                    return None if self.is_held_back() else found
        return None

    async def prune(self, head: Head) -> int:
        async with self._archive.writing() as connection:
            removed = 0
            for table in ENTRY_TABLES:
                gone = sa.delete(table).where(table.c.log == head.log, table.c.sequence <= head.upto)
                removed += (await connection.execute(gone)).rowcount
            if head.last:
                await connection.execute(sa.delete(gaps).where(gaps.c.log == head.log))
                await connection.execute(sa.delete(logs).where(logs.c.log == head.log))
        return removed

    async def give_back(self) -> bool:
        """A part of the free pages, to the file system. Returns whether there was one to give."""
        if not self._is_sqlite:
            return False
        async with self._archive.reading() as connection:
            free, pages = await _pragma(connection, "freelist_count"), await _pragma(connection, "page_count")
            shrinks = await _pragma(connection, "auto_vacuum") == INCREMENTAL
            if not shrinks or free <= FREE_SHARE * pages or self.is_held_back():
                return False
            raw = await connection.get_raw_connection()
            driver = raw.driver_connection
            assert driver is not None
            await driver.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # a row for each page: read all
        return True

    async def size(self) -> Size:
        async with self._archive.reading() as connection:
            if self._is_sqlite:
                page = await _pragma(connection, "page_size")
                pages, free = await _pragma(connection, "page_count"), await _pragma(connection, "freelist_count")
                return Size((pages - free) * page, pages * page + self._archive.wal_bytes())
            return await _size_of_server(connection)

    async def begins(self) -> Beginning | None:
        """The first entry of the oldest log."""
        async with self._archive.reading() as connection:
            for log, identity in await connection.execute(
                sa.select(logs.c.log, logs.c.identity).order_by(*self._by_age)
            ):
                first = sa.select(events.c.sequence, events.c.at).where(events.c.log == log)
                found = (await connection.execute(first.order_by(events.c.sequence).limit(1))).first()
                if found is not None:
                    return Beginning(identity, found.sequence, found.at)
        return None

    async def newest_times(self, rows_max: int) -> list[EngineSeconds]:
        """Of the newest events, the newest first."""
        times: list[EngineSeconds] = []
        async with self._archive.reading() as connection:
            for log in (await connection.execute(sa.select(logs.c.log).order_by(*self._by_age))).scalars().all()[::-1]:
                last = sa.select(events.c.at).where(events.c.log == log).order_by(events.c.sequence.desc())
                times += (await connection.execute(last.limit(rows_max - len(times)))).scalars()
                if len(times) == rows_max:
                    break
        return times

    def is_held_back(self) -> bool:
        """By a reader: nothing is deleted until it is done, as that would add to the write-ahead log."""
        return self._archive.wal_bytes() > WAL_BYTES_KEPT


async def _head_of(connection: AsyncConnection, log: str, rows_max: int, *, keeps_newest: bool) -> Head | None:
    first = sa.select(events.c.sequence, events.c.at).where(events.c.log == log).order_by(events.c.sequence)
    rows = list(await connection.execute(first.limit(rows_max)))
    first_dead = sa.select(dead_letters.c.sequence).where(dead_letters.c.log == log).order_by(dead_letters.c.sequence)
    dead = list((await connection.execute(first_dead.limit(rows_max))).scalars())
    if not rows and not dead:
        return None
    both = [row.sequence for row in rows], dead
    cut = [sequences[-1] for sequences in both if len(sequences) == rows_max]
    upto = min(cut) if cut else max(both[0] + both[1])
    if keeps_newest:
        newest = [sa.select(sa.func.max(table.c.sequence)).where(table.c.log == log) for table in ENTRY_TABLES]
        upto = min(upto, max([(await connection.execute(of)).scalar() or 0 for of in newest]) - 1)
    times = [row.at for row in rows if row.sequence <= upto]
    if times:
        at = times[len(times) // 2]
    elif rows:
        at = rows[0].at
    else:
        at = None if keeps_newest else 0.0
    anything = upto >= min(both[0] + both[1])
    return Head(log, upto, at, last=not cut and not keeps_newest) if anything else None


async def _pragma(connection: AsyncConnection, name: str) -> int:
    return int((await connection.exec_driver_sql(f"PRAGMA {name}")).scalar() or 0)


async def _size_of_server(connection: AsyncConnection) -> Size:
    disk = 0
    for table in ENTRY_TABLES:
        disk += (await connection.execute(sa.select(sa.func.pg_total_relation_size(table.name)))).scalar() or 0
    entries = 0.0
    for log in list((await connection.execute(sa.select(logs.c.log))).scalars()):
        entries += await _entries_of(connection, log)
    event, dead = await _sample(connection, events), await _sample(connection, dead_letters)
    rows = min(entries, event.rows + dead.rows)  # fewer than entries if somebody deleted some
    dead_rows = min(rows, dead.rows)
    used = (rows - dead_rows) * event.row_bytes + dead_rows * dead.row_bytes
    return Size(min(disk, int(used)), disk)


async def _entries_of(connection: AsyncConnection, log: str) -> int:
    """From the ends of the log and its gaps: counting rows would read a whole index."""
    ends: list[Sequence] = []
    for table in ENTRY_TABLES:
        of_table = sa.select(sa.func.min(table.c.sequence), sa.func.max(table.c.sequence)).where(table.c.log == log)
        ends += [end for end in (await connection.execute(of_table)).one() if end is not None]
    if not ends:
        return 0
    first, last = min(ends), max(ends)
    missing = sa.select(sa.func.sum(gaps.c.sequence - gaps.c.after_sequence - 1)).where(
        gaps.c.log == log, gaps.c.after_log == log, gaps.c.after_sequence >= first, gaps.c.sequence <= last
    )
    return last - first + 1 - int((await connection.execute(missing)).scalar() or 0)


async def _sample(connection: AsyncConnection, table: sa.Table) -> _Sample:
    """Of the same pages each time (`REPEATABLE`): they stay in memory, and the estimate does not jump about."""
    bytes_of_pages = (await connection.execute(sa.select(sa.func.pg_relation_size(table.name)))).scalar() or 0
    percent = min(100.0, 100.0 * SAMPLE_PAGES * PAGE_BYTES / max(1, bytes_of_pages))
    sampled = sa.text(
        f"SELECT count(*), avg(pg_column_size(payload)) FROM {table.name} TABLESAMPLE SYSTEM ({percent}) REPEATABLE (1)"
    )
    rows, payload = (await connection.execute(sampled)).one()
    return _Sample(rows * 100.0 / percent, float(payload or 0) + ROW_OVERHEAD_BYTES)
