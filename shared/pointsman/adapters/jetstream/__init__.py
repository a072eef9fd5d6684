"""The event log and the commands of a pool over one NATS connection that is made in the background and reconnects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from pointsman.adapters.jetstream.checkpoints import JetStreamCheckpoints
from pointsman.adapters.jetstream.client import CLOSE_SECONDS_MAX, NatsConnection
from pointsman.adapters.jetstream.commands import JetStreamCommands, Requests
from pointsman.adapters.jetstream.direct_stream import DirectStream
from pointsman.adapters.jetstream.identity import Identity
from pointsman.adapters.jetstream.key_value import JetStreamKeyValue
from pointsman.adapters.jetstream.lease import JetStreamLease
from pointsman.adapters.jetstream.log import JetStreamLog
from pointsman.adapters.jetstream.producer import WindowSettings
from pointsman.adapters.jetstream.stream import Stream, StreamSettings
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.permissions import INBOX, JETSTREAM_API, SCALER_KEY, SERVICE_API, Account, BusRole, BusUser
from pointsman.contracts.subjects import stream_name
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName, WallSeconds

__all__ = ["Identity", "StreamSettings", "WindowSettings", "connect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """`api`: of JetStream; `creates`: streams and buckets; `reads_direct`: without a consumer, and writes nothing."""

    api: str
    creates: bool
    reads_direct: bool
    marks_losses: bool

    @classmethod
    def of(cls, user: BusUser | None, *, restricted: bool, api: str) -> "_Mode":
        in_fleet = user is None or user.account is Account.FLEET
        return cls(
            api=SERVICE_API if restricted and not in_fleet and api == JETSTREAM_API else api,
            creates=not restricted or user is None or user.role is BusRole.SCHEDULER,
            reads_direct=user is not None and user.account is Account.PEOPLE,
            marks_losses=not restricted or in_fleet,
        )


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
    user: BusUser | None = None,
    identity: Identity | None = None,
    api: str = JETSTREAM_API,
    reads_every: WallSeconds = WallSeconds(0.0),
) -> AsyncIterator[Link]:
    """Connect to `pool` at `url` (several: comma-separated); returns at once. `stream`: to create a missing stream. With
    credentials in `identity`, `user` decides what this process does. `api`: first tokens of JetStream's API. `reads_every`: new
    entries are read in batches, this far apart; 0: each as it comes. On exit waits at most CLOSE_SECONDS_MAX for
    unconfirmed writes."""
    listener, identity = listener or LogListener(), identity or Identity()
    mode = _Mode.of(user, restricted=bool(identity.credentials), api=api)
    connection = NatsConnection(url, name, listener, identity)
    requests = Requests(connection, inbox=user.inbox if user is not None else INBOX, api=mode.api)
    settings = stream or StreamSettings()
    own_stream = Stream(requests, pool, settings, creates=mode.creates)
    elections = DirectStream(requests, stream_name(pool))
    window = window or WindowSettings()
    window = replace(window, marks_losses=window.marks_losses and mode.marks_losses)
    log = JetStreamLog(
        connection,
        own_stream,
        elections,
        pool,
        clock,
        listener,
        name,
        window,
        direct=mode.reads_direct,
        reads_every=reads_every,
    )
    await requests.open()
    await log.open()
    tasks = [asyncio.create_task(connection.stay_connected(), name="connection")]
    if not mode.reads_direct:
        tasks.append(asyncio.create_task(log.keep_stream(), name="stream"))
    tell_end = partial(_tell_end, listener)
    for task in tasks:
        task.add_done_callback(tell_end)
    try:
        yield Link(
            log,
            JetStreamCommands(connection, requests, listener),
            JetStreamLease(requests, pool, replicas=settings.replicas, creates=mode.creates),
            JetStreamCheckpoints(requests, pool, listener, replicas=settings.replicas, creates=mode.creates),
            JetStreamLease(requests, pool, replicas=settings.replicas, creates=mode.creates, key=SCALER_KEY),
            JetStreamKeyValue(requests, clock, replicas=settings.replicas),
        )
    finally:
        if connection.connected:
            await log.flush(WallSeconds(CLOSE_SECONDS_MAX))
        log.close()
        for task in tasks:
            task.remove_done_callback(tell_end)
        await _cancel(tasks)
        await connection.close()


def _tell_end(listener: LogListener, task: asyncio.Task[None]) -> None:
    """Of one that runs without end: not ready until a restart."""
    reason = "it was cancelled" if task.cancelled() else repr(task.exception())
    listener.log_missing(f"task {task.get_name()} ended: {reason}; restart this process")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel repeatedly: nats-py swallows a cancellation at the end of a connection attempt (Python 3.11)."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CLOSE_SECONDS_MAX)
