"""Makes the archive's tables and its view, at each start. In: a database, empty or of an earlier version. Out: it has what
this version needs. Rows stay; so do grants on the view and views that depend on it, unless its columns are others."""

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from pointsman_recorder.database_errors import UnusableDatabaseError, sqlstate
from pointsman_recorder.schema import ENTRY_TABLES, metadata

log = structlog.get_logger()

VACUUM_EARLY = "autovacuum_vacuum_scale_factor=0.02"
"""The space of deleted rows is used again after 2% of the rows, not after 20%."""
SQLSTATE_OTHER_COLUMNS = "42P16"
"""A view has columns that its new definition lacks, or in another order."""
SQLSTATE_DEPENDENTS = "2BP01"
SQLSTATE_LOCKED = "55P03"
LOCK_SECONDS_MAX = 1
"""Whoever waits to replace a view lets nobody begin to read it meanwhile."""


async def prepare(connection: AsyncConnection, view: str) -> None:
    """`view`: its definition. Raises UnusableDatabaseError."""
    is_postgresql = connection.dialect.name == "postgresql"
    if is_postgresql:
        await _check_encoding(connection)
    await connection.run_sync(metadata.create_all)
    if is_postgresql:
        if await _differs(connection, view):
            await _replace_soon(connection, view)
        await _vacuum_early(connection)
    else:
        await _create_view(connection, view)


async def _create_view(connection: AsyncConnection, view: str) -> None:
    await connection.execute(sa.text("DROP VIEW IF EXISTS requests"))
    await connection.execute(sa.text(f"CREATE {view}"))


async def _differs(connection: AsyncConnection, view: str) -> bool:
    """Asks the server how it would write `view`: replacing one waits for all transactions that have read it."""
    definition = sa.text("SELECT pg_get_viewdef(to_regclass('requests'))")
    kept = (await connection.execute(definition)).scalar()
    if kept is None:
        return True
    try:
        async with connection.begin_nested() as undone:
            await connection.execute(sa.text(f"CREATE TEMP {view}"))
            wanted = (await connection.execute(definition)).scalar()  # a temporary one is found first
            await undone.rollback()
    except DBAPIError:  # such as no right to make temporary ones
        return True
    return bool(wanted != kept)


async def _replace_soon(connection: AsyncConnection, view: str) -> None:
    """Raises UnusableDatabaseError."""
    await connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'"))
    try:
        await _replace_view(connection, view)
    except DBAPIError as error:
        if sqlstate(error) != SQLSTATE_LOCKED:
            raise
        raise UnusableDatabaseError(
            "the view requests is another in this version, and a transaction that has read it is open: end it"
        ) from error


async def _replace_view(connection: AsyncConnection, view: str) -> None:
    """Keeps the grants on the view and the views that depend on it, unless its columns are others. Raises
    UnusableDatabaseError."""
    try:
        async with connection.begin_nested():
            await connection.execute(sa.text(f"CREATE OR REPLACE {view}"))
    except DBAPIError as error:
        if sqlstate(error) != SQLSTATE_OTHER_COLUMNS:
            raise
        await _create_other_columns(connection, view)


async def _create_other_columns(connection: AsyncConnection, view: str) -> None:
    try:
        await _create_view(connection, view)
    except DBAPIError as error:
        if sqlstate(error) != SQLSTATE_DEPENDENTS:
            raise
        dependents = " ".join(str(getattr(getattr(error.orig, "__cause__", None), "detail", "")).split())  # of asyncpg
        raise UnusableDatabaseError(
            f"the view requests has other columns in this version, and others depend on it ({dependents or error.orig}): "
            "drop those, and create them again when the recorder is ready"
        ) from error
    log.warning("archive_view_replaced", view="requests", note="its columns are others now: grant access to it again")


async def _check_encoding(connection: AsyncConnection) -> None:
    """Another encoding lacks characters that tenants and reasons may have. Raises UnusableDatabaseError."""
    encoding = (await connection.execute(sa.text("SHOW server_encoding"))).scalar()
    if encoding != "UTF8":
        raise UnusableDatabaseError(
            f"the database has encoding {encoding}; create one with ENCODING 'UTF8' and name it in --archive-url"
        )


async def _vacuum_early(connection: AsyncConnection) -> None:
    options = sa.text(
        "SELECT coalesce(array_to_string(reloptions, ','), '') FROM pg_class WHERE oid = to_regclass(:name)"
    )
    for table in ENTRY_TABLES:
        if VACUUM_EARLY not in ((await connection.execute(options, {"name": table.name})).scalar() or ""):
            await connection.execute(sa.text(f"ALTER TABLE {table.name} SET ({VACUUM_EARLY})"))
