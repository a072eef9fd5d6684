"""A reader that can wait: entries come in batches, nobody asks while nothing comes, and the first entry after a silence
comes by itself. The rest of what a reader promises is in `test_event_log`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import nats
import pytest
from nats.aio.msg import Msg

from pointsman.ports import Link, LogEntry
from pointsman.primitives import WallSeconds
from tests.conftest import pools
from tests.support.events import stored
from tests.support.log_worlds import JetStreamWorld, SharedServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(60)


@dataclass
class Reading:
    writer: Link
    reader: Link
    pulls: list[bytes] = field(default_factory=list)
    """What the reader asked the server for."""
    entries: list[LogEntry] = field(default_factory=list)

    async def collect(self) -> None:
        async with aclosing(self.reader.log.read()) as entries:  # type: ignore[type-var]
            async for entry in entries:
                assert isinstance(entry, LogEntry)
                self.entries.append(entry)


@asynccontextmanager
async def reading(server: SharedServer, every: WallSeconds) -> AsyncIterator[Reading]:
    pool = next(pools)
    writing, batches = JetStreamWorld(pool, server), JetStreamWorld(pool, server, reads_every=every)
    async with writing.client("writer") as writer, batches.client("reader") as reader:
        found = Reading(writer, reader)

        async def on_pull(message: Msg) -> None:
            found.pulls.append(message.data)

        spy = await nats.connect(server.url)
        await spy.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=on_pull)
        await spy.flush()
        collecting = asyncio.create_task(found.collect())
        try:
            yield found
        finally:
            collecting.cancel()
            await spy.close()


async def test_entries_written_together_are_asked_for_together(server: SharedServer) -> None:
    async with reading(server, WallSeconds(0.5)) as found:
        for number in range(200):
            await found.writer.log.append(stored("engine-1", number + 1, [number]))
        await eventually(lambda: len(found.entries) == 200)

        assert [entry.sequence for entry in found.entries] == list(range(1, 201))
        assert len(found.pulls) < 20


async def test_nobody_asks_while_nothing_comes(server: SharedServer) -> None:
    async with reading(server, WallSeconds(0.01)) as found:
        await eventually(lambda: bool(found.pulls) and b"idle_heartbeat" in found.pulls[-1])
        asked = len(found.pulls)
        await found.writer.log.append(stored("engine-1", 1, [1]))
        await eventually(
            lambda: len(found.entries) == 1 and len(found.pulls) > asked and b"idle_heartbeat" in found.pulls[-1]
        )
        before = len(found.pulls)
        await asyncio.sleep(0.3)

        assert len(found.pulls) == before


async def test_the_first_entry_after_a_silence_does_not_wait_for_the_others(server: SharedServer) -> None:
    async with reading(server, WallSeconds(3600.0)) as found:
        await eventually(lambda: bool(found.pulls) and b"idle_heartbeat" in found.pulls[-1])

        await found.writer.log.append(stored("engine-1", 1, [1]))

        await eventually(lambda: len(found.entries) == 1)
