"""People read the log by direct gets: the same entries, and a LogReset where the log does not go on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.jetstream import StreamSettings
from pointsman.adapters.jetstream.stream import Stream
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Link, LogEntry, LogExtent, LogReset, LogUnavailableError
from tests.conftest import pools
from tests.support.events import joined, stored
from tests.support.log_worlds import JetStreamWorld, RememberingListener, SharedServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def world(server: SharedServer) -> JetStreamWorld:
    return JetStreamWorld(next(pools), server)


@asynccontextmanager
async def reader(
    world: JetStreamWorld, server: SharedServer, listener: RememberingListener | None = None
) -> AsyncIterator[Link]:
    async with jetstream.connect(
        server.url,
        world.pool,
        ScaledClock(),
        name="reader",
        user=BusUser(BusRole.READER),
        listener=listener or RememberingListener(),
    ) as link:
        await eventually(lambda: link.commands.connected)
        yield link


async def test_all_entries_come_in_order_and_then_new_ones(world: JetStreamWorld, server: SharedServer) -> None:
    count = 2500  # more than two batches
    async with world.client(window_max=5000) as writer, reader(world, server) as link:
        for number in range(1, count):
            writer.log.append_soon(stored("engine-1", number, [number]))
        await writer.log.append(stored("engine-1", count, [count]))
        reading = link.log.read(1)
        found = [await anext(reading) for _ in range(count)]
        await writer.log.append(joined("engine-1"))
        found.append(await anext(reading))

    assert [entry.sequence for entry in found if isinstance(entry, LogEntry)] == list(range(1, count + 2))


async def test_only_the_kinds_asked_for_come(world: JetStreamWorld, server: SharedServer) -> None:
    async with world.client() as writer, reader(world, server) as link:
        for event in (stored("engine-1", 1, [1]), joined("engine-1"), stored("engine-10", 1, [1]), joined("engine-2")):
            await writer.log.append(event)
        reading = link.log.read(1, kinds=("kv.engine-1", "fleet"))
        found = [await anext(reading) for _ in range(3)]

    assert [entry.sequence for entry in found if isinstance(entry, LogEntry)] == [1, 2, 4]


async def test_a_log_that_lost_its_beginning_says_so(world: JetStreamWorld, server: SharedServer) -> None:
    async with (
        jetstream.connect(
            server.url, world.pool, ScaledClock(), name="w", stream=StreamSettings(bytes_max=20_000)
        ) as writer,
        reader(world, server) as link,
    ):
        for number in range(1, 200):
            await writer.log.append(stored("engine-1", number, list(range(1, 20))))
        first = (await link.log.extent()).first
        reading = link.log.read(1)
        reset, entry = await anext(reading), await anext(reading)

    assert first > 1
    assert isinstance(reset, LogReset)
    assert reset.first_sequence == first
    assert isinstance(entry, LogEntry)
    assert entry.sequence == first


@pytest.mark.parametrize("entries", [1, 5], ids=["shorter", "longer"])
async def test_a_log_made_anew_is_read_from_its_beginning(
    world: JetStreamWorld, server: SharedServer, entries: int
) -> None:
    async with world.client() as writer, reader(world, server) as link:
        for number in range(1, 4):
            await writer.log.append(stored("engine-1", number, [number]))
        reading = link.log.read(2)
        assert [(await anext(reading)).sequence for _ in range(2)] == [2, 3]  # type: ignore[union-attr]
        await world.recreate(writer)
        for number in range(1, entries + 1):
            await writer.log.append(joined(f"engine-{number}"))
        reset, entry = await anext(reading), await anext(reading)

    assert isinstance(reset, LogReset)
    assert isinstance(entry, LogEntry)
    assert entry.sequence == 1


async def test_a_log_made_anew_that_does_not_say_where_it_begins_is_asked_again(
    world: JetStreamWorld, server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, answers, unanswered = RememberingListener(), Stream.extent, iter(["no answer yet"])

    async def extent(stream: Stream) -> LogExtent:
        if reason := next(unanswered, ""):
            raise LogUnavailableError(reason)
        return await answers(stream)

    async with world.client() as writer, reader(world, server, listener) as link:
        await writer.log.append(joined("engine-1"))
        reading = link.log.read(1)
        await anext(reading)
        await world.recreate(writer)
        for number in range(3):
            await writer.log.append(joined(f"engine-{number}"))
        monkeypatch.setattr(Stream, "extent", extent)
        reset, entry = await anext(reading), await anext(reading)

    assert isinstance(reset, LogReset)
    assert isinstance(entry, LogEntry)
    assert (entry.sequence, listener.troubles) == (1, ["reading waits: no answer yet"])
