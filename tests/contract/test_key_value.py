"""What the store of API keys and tenants promises, in memory as over a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from pointsman.ports import KeyValueStore, StoredValue, StoreUnavailableError, ValueChangedError, ValuesRead
from tests.support.log_worlds import LogWorld
from tests.support.waiting import eventually


class Copy:
    """What a reader holds who does as `follow` says."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.reads: list[ValuesRead] = []

    async def keep(self, store: KeyValueStore) -> None:
        async with aclosing(store.follow()) as following:  # type: ignore[type-var]
            async for read in following:
                self.take(read)

    def take(self, read: ValuesRead) -> None:
        if read.whole:
            self.values.clear()
        self.values.update((value.key, value.value) for value in read.values)
        self.reads.append(read)

    async def until(self, values: dict[str, bytes]) -> None:
        await eventually(lambda: bool(self.reads) and self.values == values)


@pytest.fixture(autouse=True)
async def empty(world: LogWorld) -> None:
    """The worlds of one server share their store."""
    async with world.client("cleaner") as cleaner:
        await world.recreate_access(cleaner)


@pytest.fixture
async def copy(world: LogWorld) -> AsyncIterator[Copy]:
    copy = Copy()
    async with world.client("reader") as reader:
        keeping = asyncio.create_task(copy.keep(reader.access))
        yield copy
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_value_is_written_by_whoever_has_seen_it_last(world: LogWorld) -> None:
    async with world.client("one") as one, world.client("two") as two:
        assert await one.access.get("tenants") is None
        first = await one.access.put("tenants", b"1", after=0)
        with pytest.raises(ValueChangedError):
            await two.access.put("tenants", b"2", after=0)
        other = await two.access.put("key.a", b"a", after=0)
        second = await two.access.put("tenants", b"2", after=first)
        with pytest.raises(ValueChangedError):
            await one.access.put("tenants", b"1", after=first)

        assert first < other < second
        assert await one.access.get("tenants") == StoredValue("tenants", b"2", second)
        found = await one.access.read()
        assert sorted(found.values, key=lambda value: value.key) == [
            StoredValue("key.a", b"a", other),
            StoredValue("tenants", b"2", second),
        ]


async def test_a_reader_without_a_store_knows_that_there_is_none(world: LogWorld, copy: Copy) -> None:
    await copy.until({})

    assert copy.reads == [ValuesRead([], whole=True, exists=False)]


async def test_a_reader_gets_each_change(world: LogWorld, copy: Copy) -> None:
    async with world.client("writer") as writer:
        await copy.until({})
        a = await writer.access.put("key.a", b"1", after=0)
        await copy.until({"key.a": b"1"})
        await writer.access.put("key.b", b"1", after=0)
        await copy.until({"key.a": b"1", "key.b": b"1"})
        a = await writer.access.put("key.a", b"2", after=a)
        await copy.until({"key.a": b"2", "key.b": b"1"})
        await writer.access.put("key.a", b"3", after=a)
        await copy.until({"key.a": b"3", "key.b": b"1"})

        assert len(copy.reads) == 5


async def test_a_reader_goes_on_after_the_server_was_away(world: LogWorld, copy: Copy) -> None:
    async with world.client("writer") as writer:
        a = await writer.access.put("key.a", b"1", after=0)
        await copy.until({"key.a": b"1"})
        await world.stop()
        with pytest.raises(StoreUnavailableError):
            await writer.access.get("key.a")
        with pytest.raises(StoreUnavailableError):
            await writer.access.put("key.a", b"2", after=a)
        with pytest.raises(StoreUnavailableError):
            await writer.access.read()
        assert copy.values == {"key.a": b"1"}
        await world.start()

        await eventually(lambda: _written(writer.access, "key.b"))
        await copy.until({"key.a": b"1", "key.b": b"b"})


async def test_a_reader_is_told_that_nothing_is_read_and_once_more_when_it_is_again(
    world: LogWorld, copy: Copy
) -> None:
    async with world.client("writer") as writer:
        await writer.access.put("key.a", b"1", after=0)
        await copy.until({"key.a": b"1"})
        before = len(copy.reads)
        await world.stop()
        await eventually(lambda: len(copy.reads) > before)
        away = copy.reads[before:]
        await world.start()
        await eventually(lambda: not copy.reads[-1].unread)

    assert [(read.values, read.whole, bool(read.unread)) for read in away] == [([], False, True)]
    assert copy.reads[-1] == ValuesRead([], whole=False)
    assert copy.values == {"key.a": b"1"}


async def test_after_the_store_was_recreated_its_reader_has_only_the_new_values(world: LogWorld, copy: Copy) -> None:
    async with world.client("writer") as writer:
        for name in "abc":
            await writer.access.put(f"key.{name}", b"old", after=0)
        await copy.until({f"key.{name}": b"old" for name in "abc"})
        await world.recreate_access(writer)
        for name in "defghi":
            await writer.access.put(f"key.{name}", b"new", after=0)

        await copy.until({f"key.{name}": b"new" for name in "defghi"})


async def test_a_reader_that_starts_late_reads_everything(world: LogWorld) -> None:
    async with world.client("writer") as writer:
        for number in range(300):
            await writer.access.put(f"key.{number}", b"%d" % number, after=0)
        found = await writer.access.read()

        assert {value.key: value.value for value in found.values} == {f"key.{n}": b"%d" % n for n in range(300)}


async def _written(store: KeyValueStore, key: str) -> bool:
    try:
        await store.put(key, b"b", after=0)
    except StoreUnavailableError:
        return False
    except ValueChangedError:  # an earlier write, taken for lost
        pass
    return True
