"""The event log and the commands of a pool over one NATS connection that is made in the background and reconnects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman.adapters.jetstream.checkpoints import JetStreamCheckpoints
from pointsman.adapters.jetstream.client import CLOSE_SECONDS_MAX, NatsConnection
from pointsman.adapters.jetstream.commands import JetStreamCommands, Requests
from pointsman.adapters.jetstream.direct_stream import DirectStream
from pointsman.adapters.jetstream.key_value import JetStreamKeyValue
from pointsman.adapters.jetstream.lease import SCALER_KEY, JetStreamLease
from pointsman.adapters.jetstream.log import JetStreamLog
from pointsman.adapters.jetstream.producer import WindowSettings
from pointsman.adapters.jetstream.stream import Stream, StreamSettings
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.subjects import stream_name
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName, WallSeconds

__all__ = ["StreamSettings", "WindowSettings", "connect"]


@asynccontextmanager
async def connect(
    url: str,
    pool: PoolName,
    clock: Clock,
    *,
    name: str,
    listener: LogListener | None = None,
    stream: StreamSettings | None = None,
    window: WindowSettings | None = None,
    only_reads: bool = False,
) -> AsyncIterator[Link]:
    """Connect to `pool` at `url` (several: comma-separated); returns at once. `stream`: to create a missing stream,
    unless `only_reads`. On exit waits at most CLOSE_SECONDS_MAX for unconfirmed writes."""
    listener = listener or LogListener()
    connection = NatsConnection(url, name, listener)
    requests = Requests(connection)
    settings = stream or StreamSettings()
    elections = DirectStream(requests, stream_name(pool))
    log = JetStreamLog(connection, Stream(requests, pool, settings), elections, pool, clock, listener, name, window)
    await requests.open()
    await log.open()
    tasks = [asyncio.create_task(connection.stay_connected())]
    if not only_reads:
        tasks.append(asyncio.create_task(log.keep_stream()))
    try:
        yield Link(
            log,
            JetStreamCommands(connection, requests, listener),
            JetStreamLease(requests, pool, replicas=settings.replicas),
            JetStreamCheckpoints(requests, pool, replicas=settings.replicas),
            JetStreamLease(requests, pool, replicas=settings.replicas, key=SCALER_KEY),
            JetStreamKeyValue(requests, clock, replicas=settings.replicas),
        )
    finally:
        if connection.connected:
            await log.flush(WallSeconds(CLOSE_SECONDS_MAX))
        log.close()
        await _cancel(tasks)
        await connection.close()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel repeatedly: nats-py swallows a cancellation at the end of a connection attempt (Python 3.11)."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CLOSE_SECONDS_MAX)
