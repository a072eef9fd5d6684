"""An empty archive in any database, and questions to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy as sa

from pointsman_recorder.archive import Archive, open_archive
from pointsman_recorder.schema import metadata


@asynccontextmanager
async def archive_at(url: str) -> AsyncIterator[Archive]:
    async with open_archive(url) as archive:
        if url.startswith("postgresql"):  # one server for all tests
            async with archive.engine.begin() as connection:
                await connection.execute(sa.text("DROP VIEW IF EXISTS requests"))
                await connection.run_sync(metadata.drop_all)
        await archive.prepare()
        yield archive


async def ask(archive: Archive, query: str) -> list[tuple[Any, ...]]:
    async with archive.engine.connect() as connection:
        return [tuple(found) for found in await connection.execute(sa.text(query))]
