"""The log and the commands of a pool over NATS, on one connection that is made in the background and made again for ever.

`client` (nats-py) implements `connection`; on it stand `producer` (events in), `consumer` (events out), `stream` and `direct_stream`
(calls of the JetStream API), `commands` (request and reply), `lease` and `checkpoints` (buckets beside the log).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pointsman.adapters.jetstream.checkpoints import JetStreamCheckpoints
from pointsman.adapters.jetstream.client import CLOSE_SECONDS_MAX, NatsConnection
from pointsman.adapters.jetstream.commands import JetStreamCommands, Requests
from pointsman.adapters.jetstream.direct_stream import DirectStream
from pointsman.adapters.jetstream.lease import SCALER_KEY, JetStreamLease
from pointsman.adapters.jetstream.log import JetStreamLog
from pointsman.adapters.jetstream.producer import WindowSettings
from pointsman.adapters.jetstream.stream import Stream, StreamSettings
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.subjects import stream_name
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName

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
    """The log of `pool` and its commands, over the nats-server at `url` (several: separated by commas).

    Returns at once and connects in the background, for ever. `name` is who we are to the server and in WritesLost
    events. `stream` says how the pool's stream is made if this process is the first; where it `only_reads`, none is
    made. Leaving the context waits at most CLOSE_SECONDS_MAX for unconfirmed writes.
    """
    hear = listener or LogListener()
    connection = NatsConnection(url, name, hear)
    requests = Requests(connection)
    settings = stream or StreamSettings()
    elections = DirectStream(requests, stream_name(pool))
    log = JetStreamLog(connection, Stream(requests, pool, settings), elections, pool, clock, hear, name, window)
    await requests.open()
    await log.open()
    tasks = [asyncio.create_task(connection.stay_connected())]
    if not only_reads:
        tasks.append(asyncio.create_task(log.keep_stream()))
    try:
        yield Link(
            log,
            JetStreamCommands(connection, requests, hear),
            JetStreamLease(requests, pool, replicas=settings.replicas),
            JetStreamCheckpoints(requests, pool, replicas=settings.replicas),
            JetStreamLease(requests, pool, replicas=settings.replicas, key=SCALER_KEY),
        )
    finally:
        if connection.connected:
            await log.flush(CLOSE_SECONDS_MAX)
        log.close()
        await _ended(tasks)
        await connection.close()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks until they have ended: a cancellation that meets the very end of an attempt to connect is taken for
    one more failure by the client (in Python 3.11's `wait_for`), which then goes on."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CLOSE_SECONDS_MAX)
