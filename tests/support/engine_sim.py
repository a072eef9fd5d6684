"""A simulated engine inside the test's own process, and a reader of its KV events as plain as can be."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pointsman.runtime.supervision import Supervisor
from pointsman_engine_sim.server import EngineServer, engine_server
from pointsman_engine_sim.settings import EngineSimSettings

FREE_PORTS = json.dumps(
    {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        "topic": "kv",
    }
)
WAIT_SECONDS = 5.0


@contextlib.asynccontextmanager
async def running_engine(**settings: Any) -> AsyncIterator[EngineServer]:
    """Serves on free ports, with KV events, 50 times faster than real time, unless told otherwise."""
    told: dict[str, Any] = {"speed": 50.0, "block_size": 16, "kv_events_config": FREE_PORTS} | settings
    async with Supervisor() as supervisor, engine_server(EngineSimSettings(**told), supervisor) as server:
        yield server


@dataclass(frozen=True)
class Batch:
    """One batch of events off the wire."""

    sequence: int
    at: float
    events: list[dict[str, Any]]
    rank: int | None


@dataclass
class HeldBlocks:
    """What an engine holds, folded from its events: token ids by block hash."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def apply(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            size = event["block_size"]
            for index, block in enumerate(event["block_hashes"]):
                self.tokens[block] = tuple(event["token_ids"][index * size : (index + 1) * size])
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.tokens[block]
        else:
            assert event == {"type": "AllBlocksCleared"}
            self.tokens.clear()


class EventReader:
    """Reads both sockets of an engine."""

    def __init__(self, server: EngineServer) -> None:
        assert server.events_endpoint is not None
        assert server.replay_endpoint is not None
        self._context = zmq.asyncio.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.subscribe(b"kv")
        self._subscriber.connect(server.events_endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(server.replay_endpoint)

    async def __aenter__(self) -> "EventReader":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def arrived(self, *, quiet_seconds: float = 0.1) -> list[Batch]:
        """What was published and not read yet; ends when nothing comes for a while."""
        batches = []
        while await self._subscriber.poll(quiet_seconds * 1000):
            topic, sequence, payload = await self._subscriber.recv_multipart()
            assert topic == b"kv"
            batches.append(_batch(sequence, payload))
        return batches

    async def up_to(self, last: int) -> list[Batch]:
        """What was published and not read yet, when the batch with sequence `last` has come."""
        batches: list[Batch] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while not batches or batches[-1].sequence < last:
                _, sequence, payload = await self._subscriber.recv_multipart()
                batches.append(_batch(sequence, payload))
        return batches

    async def replay(self, first: int = 0) -> list[Batch]:
        """What the engine's buffer holds from sequence `first` on."""
        await self._dealer.send_multipart((b"", first.to_bytes(8, "big")))
        batches: list[Batch] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                empty, sequence, payload = await self._dealer.recv_multipart()
                assert empty == b""
                if int.from_bytes(sequence, "big", signed=True) == -1:
                    return batches
                batches.append(_batch(sequence, payload))


def _batch(sequence: bytes, payload: bytes) -> Batch:
    assert len(sequence) == 8
    at, events, rank = msgspec.msgpack.decode(payload)
    return Batch(int.from_bytes(sequence, "big"), at, events, rank)
