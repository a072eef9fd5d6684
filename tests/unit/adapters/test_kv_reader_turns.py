"""An engine that floods, or has much to replay, leaves turns to the others that the process follows."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from typing_extensions import override

from pointsman.adapters.kv_events.events import EngineBatch
from pointsman.adapters.kv_events.reader import MESSAGES_PER_TURN_MAX, KvEventReader
from pointsman.adapters.kv_events.sockets import EngineSockets, KvEndpoint, LiveSocket, ReplaySocket
from pointsman.primitives import EngineSeconds, Sequence

PAYLOAD = msgspec.msgpack.encode([0.0, [], 0])
BATCHES = 2_000


class Flood(EngineSockets, LiveSocket, ReplaySocket):
    """Everything is there at once: no call ever waits."""

    def __init__(self, *, replayed: int) -> None:
        self.live, self.replay = self, self
        self._replayed = replayed
        self._next = replayed

    @override
    async def connected(self, seconds: EngineSeconds) -> None: ...

    @override
    def interrupted(self) -> bool:
        return False

    @override
    async def arrival(self, seconds: EngineSeconds) -> bool:
        return True

    @override
    def receive(self) -> list[bytes] | None:
        self._next += 1
        return [b"kv", (self._next - 1).to_bytes(8, "big"), PAYLOAD]

    @override
    def discard(self) -> None: ...

    @override
    async def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        for sequence in range(start, self._replayed):
            yield sequence, PAYLOAD

    @override
    def close(self) -> None: ...


async def turns_of_others(replayed: int) -> int:
    """While BATCHES are read."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    read = 0
    reader = KvEventReader(KvEndpoint("tcp://h:1", "tcp://h:2"), sockets=lambda _: Flood(replayed=replayed))
    async with aclosing(reader.items()) as items:
        async for item in items:
            read += isinstance(item, EngineBatch)
            if read == BATCHES:
                break
    task.cancel()
    return turns


async def test_a_flood_leaves_turns() -> None:
    assert await turns_of_others(0) >= BATCHES / MESSAGES_PER_TURN_MAX / 2


async def test_a_long_replay_leaves_turns() -> None:
    assert await turns_of_others(BATCHES) >= BATCHES / MESSAGES_PER_TURN_MAX / 2
