"""What the bucket's followers ask a real nats-server for: little while nothing changes, and not everything for one change."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from pointsman.adapters.jetstream import key_value
from pointsman.adapters.jetstream.direct_stream import DirectStream, Found
from pointsman.ports import KeyValueStore, ValuesRead
from pointsman.primitives import PoolName, WallSeconds
from tests.support.log_worlds import JetStreamWorld, SharedServer
from tests.support.waiting import eventually

LARGE = 200_000
POLLS = 60


@dataclass
class Followed:
    """`asked`: sizes of the values that the server sent."""

    asked: list[int] = field(default_factory=list)
    reads: list[ValuesRead] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)

    async def follow(self, store: KeyValueStore, keys: str) -> None:
        async with aclosing(store.follow(keys)) as following:  # type: ignore[type-var]
            async for read in following:
                if read.whole:
                    self.values.clear()
                self.values.update((value.key, value.value) for value in read.values)
                self.reads.append(read)

    async def has(self, key: str, value: bytes) -> None:
        await eventually(lambda: self.values.get(key) == value)

    async def polled(self, times: int) -> None:
        before = len(self.asked)
        await eventually(lambda: len(self.asked) >= before + times)


@pytest.fixture
async def world(server: SharedServer) -> JetStreamWorld:
    world = JetStreamWorld(PoolName("bucket"), server)
    async with world.client("cleaner") as cleaner:
        await world.recreate_access(cleaner)
    return world


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    followed = Followed()
    asked: Callable[[DirectStream, dict[str, Any]], Awaitable[Found | None]] = DirectStream._get

    async def counted(bucket: DirectStream, query: dict[str, Any]) -> Found | None:
        found = await asked(bucket, query)
        followed.asked.append(len(found.payload) if found is not None else 0)
        return found

    monkeypatch.setattr(DirectStream, "_get", counted)
    monkeypatch.setattr(key_value, "POLL_WALL_SECONDS", WallSeconds(0.01))
    return followed


async def test_a_key_that_is_made_and_revoked_is_no_reason_to_read_all_again(
    world: JetStreamWorld, followed: Followed
) -> None:
    async with world.client("one") as one:
        for number in range(200):
            await one.access.put(f"key.{number}", b"made", after=0)
        following = asyncio.create_task(followed.follow(one.access, "key."))
        await eventually(lambda: len(followed.values) == 200)
        for number in (200, 201):
            made = await one.access.put(f"key.{number}", b"made", after=0)
            await followed.has(f"key.{number}", b"made")
            await one.access.put(f"key.{number}", b"revoked", after=made)
            await followed.has(f"key.{number}", b"revoked")
        following.cancel()

    assert [(read.whole, len(read.values)) for read in followed.reads] == [(True, 200), *[(False, 1)] * 4]


async def test_a_restored_bucket_in_which_the_newest_key_was_written_again_lacks_nothing(world: JetStreamWorld) -> None:
    async with world.client("one") as one:
        await one.access.put("key.kept", b"1", after=0)
        newest = await one.access.put("key.newest", b"1", after=0)
        async with aclosing(one.access.follow("key.")) as following:  # type: ignore[type-var]
            values = {value.key: value.value for value in (await anext(following)).values}
            await world.recreate_access(one)  # a backup of before the newest, and what was written after it
            await one.access.put("key.kept", b"1", after=0)
            await one.access.put("key.other", b"1", after=0)
            again = await one.access.put("key.newest", b"2", after=0)
            values |= {value.key: value.value for value in (await anext(following)).values}

    assert again > newest
    assert values == {"key.kept": b"1", "key.other": b"1", "key.newest": b"2"}


async def test_a_restored_bucket_without_the_newest_key_is_read_anew(world: JetStreamWorld) -> None:
    async with world.client("one") as one:
        await one.access.put("key.kept", b"1", after=0)
        await one.access.put("key.newest", b"1", after=0)
        async with aclosing(one.access.follow("key.")) as following:  # type: ignore[type-var]
            await anext(following)
            await world.recreate_access(one)
            await one.access.put("key.kept", b"1", after=0)
            read = await anext(following)

    assert (read.whole, [value.key for value in read.values]) == (True, ["key.kept"])


async def test_a_large_value_is_not_read_at_each_poll(world: JetStreamWorld, followed: Followed) -> None:
    async with world.client("one") as one:
        await one.access.put("tenants", bytes(LARGE), after=0)
        following = asyncio.create_task(followed.follow(one.access, "tenants"))
        await eventually(lambda: len(followed.values) == 1)
        followed.asked.clear()
        await followed.polled(POLLS)
        assert sum(size == LARGE for size in followed.asked) <= POLLS // 10
        await one.access.put("tenants", b"small", after=(await one.access.read("tenants")).values[0].revision)
        await eventually(lambda: followed.values == {"tenants": b"small"})
        following.cancel()


async def test_a_large_value_that_was_written_often_is_read_once(world: JetStreamWorld, followed: Followed) -> None:
    """Readers at 32 places of the bucket would each find it: more than a server keeps for one connection."""
    async with world.client("one") as one:
        revision = 0
        for _ in range(100):
            revision = await one.access.put("tenants", b"", after=revision)
        await one.access.put("tenants", bytes(LARGE), after=revision)
        followed.asked.clear()
        read = await one.access.read("tenants")

    assert [len(value.value) for value in read.values] == [LARGE]
    assert followed.asked == [LARGE]


async def test_a_large_value_that_is_lost_is_noticed(world: JetStreamWorld, followed: Followed) -> None:
    async with world.client("one") as one:
        await one.access.put("tenants", bytes(LARGE), after=0)
        following = asyncio.create_task(followed.follow(one.access, "tenants"))
        await eventually(lambda: len(followed.values) == 1)
        await world.recreate_access(one)
        await eventually(lambda: not followed.reads[-1].exists)
        following.cancel()

    assert followed.values == {}
