"""A real nats-server for tests: one line to have it, nothing left behind."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pointsman.runtime.embedded_nats import SYNC_INTERVAL, EmbeddedNats, start_nats


@asynccontextmanager
async def running_nats(directory: Path, port: int = 0) -> AsyncIterator[str]:
    """The URL of a nats-server that keeps its store below `directory` and stops with the context."""
    async with embedded_nats(directory / "nats", port) as server:
        yield server.url


@asynccontextmanager
async def embedded_nats(
    data_dir: Path, port: int = 0, *, sync_interval: str = SYNC_INTERVAL, accounts: str = ""
) -> AsyncIterator[EmbeddedNats]:
    server = await start_nats(data_dir, port, sync_interval=sync_interval, accounts=accounts)
    try:
        yield server
    finally:
        await server.stop()
