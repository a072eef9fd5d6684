"""A real nats-server for tests: one line to have it, nothing left behind."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pointsman.runtime.embedded_nats import embedded_nats


@asynccontextmanager
async def running_nats(directory: Path, port: int = 0) -> AsyncIterator[str]:
    """The URL of a nats-server that keeps its store below `directory` and stops with the context."""
    async with embedded_nats(directory / "nats", port) as server:
        yield server.url
