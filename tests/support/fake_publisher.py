"""An engine's cache by script, and vLLM's side of the KV event sockets, with faults on request.

`ScriptedCache` is the truth: what it holds, and the events that tell of it. `FakePublisher` carries events as vLLM
does: PUB with three frames, ROUTER for replays, a bounded buffer, sequences from 0 in each life.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from pointsman.contracts.block_keys import KeyChain
from pointsman.primitives import BlockKey

BLOCK = 4
"""Tokens in one of the scripted engine's blocks."""

Event = dict[str, Any]


class ScriptedCache:
    """Blocks of prompts, known by all the tokens up to their end and by the salt."""

    def __init__(self, *, life: int = 1, bytes_hashes: bool = False) -> None:
        self.held: set[tuple[str, tuple[int, ...]]] = set()
        self._life = life
        self._bytes_hashes = bytes_hashes

    def store(self, tokens: Sequence[int], *, salt: str = "") -> Event | None:
        """The event of a prompt's blocks becoming resident; None where they all are already."""
        prefixes = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        new = [prefix for prefix in prefixes if (salt, prefix) not in self.held]
        if not new:
            return None
        self.held.update((salt, prefix) for prefix in new)
        starts = len(new[0]) == BLOCK
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(salt, prefix) for prefix in new],
            "parent_block_hash": None if starts else self._hash(salt, new[0][:-BLOCK]),
            "token_ids": list(new[-1][len(new[0]) - BLOCK :]),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [[salt] if salt and len(prefix) == BLOCK else None for prefix in new],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def evict(self, tokens: Sequence[int], *, salt: str = "") -> Event:
        """The event of the last block of these tokens going."""
        prefix = tuple(tokens)
        self.held.remove((salt, prefix))
        return {"type": "BlockRemoved", "block_hashes": [self._hash(salt, prefix)], "medium": "GPU", "group_idx": 0}

    def clear(self) -> Event:
        self.held.clear()
        return {"type": "AllBlocksCleared"}

    def keys(self, chain: KeyChain) -> set[BlockKey]:
        """The pool keys that this cache holds: whole pool blocks of which every engine block is here."""
        keys = set()
        for salt, prefix in self.held:
            if len(prefix) % chain.block_tokens:
                continue
            span = range(len(prefix) - chain.block_tokens + BLOCK, len(prefix) + 1, BLOCK)
            if all((salt, prefix[:end]) in self.held for end in span):
                keys.add(chain.extend(chain.root(cache_salt=salt), prefix)[-1])
        return keys

    def _hash(self, salt: str, prefix: tuple[int, ...]) -> int | bytes:
        number = hash((self._life, salt, prefix)) & (1 << 64) - 1
        return number.to_bytes(32, "big") if self._bytes_hashes else number


class FakePublisher:
    """Binds both sockets on free ports; open it as a context."""

    def __init__(
        self,
        *,
        buffer_steps: int = 10_000,
        by_position: bool = False,
        replay: bool = True,
        host: str = "127.0.0.1",
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._by_position = by_position
        self._with_replay = replay
        self._host = host
        self._sequence = 0
        self.ports = ports
        self.answers_replays = True

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._host}:{self.ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{self._host}:{self.ports[1]}" if self._with_replay else ""

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def publish(self, *events: Event | None, dropped: bool = False, lost: bool = False) -> None:
        """One batch of those events that are any; `dropped` ones reach the replay buffer only, `lost` ones nothing."""
        values = [by_position(event) if self._by_position else event for event in events if event is not None]
        payload = msgspec.msgpack.encode([time.time(), values, 0])
        await self.publish_raw(payload, dropped=dropped, lost=lost)

    def begin_again(self) -> None:
        """Another engine behind the same connection, as behind a proxy: sequences begin at 0."""
        self._sequence = 0
        self._buffer.clear()

    async def publish_raw(self, payload: bytes, *, dropped: bool = False, lost: bool = False) -> None:
        if not lost:
            self._buffer.append((self._sequence, payload))
        self._sequence += 1
        if not dropped and not lost:
            await self.repeat(self._sequence - 1)

    async def repeat(self, sequence: int) -> None:
        """Send a batch that is in the buffer (again)."""
        await self._pub.send_multipart((b"kv", sequence.to_bytes(8, "big"), dict(self._buffer)[sequence]))

    async def repeat_newest(self) -> None:
        """Send the newest batch again, if there is one."""
        if self._buffer:
            await self.repeat(self._buffer[-1][0])

    async def publish_frames(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def subscribed(self) -> None:
        """Wait for a subscription since the last (re)start; what is published from then on reaches it. The reader must
        be reading meanwhile: ZMQ subscribes again only within its calls."""
        while not (await self._pub.recv()).startswith(b"\x01"):
            pass

    async def restart(self) -> None:
        """A new engine at the same endpoints: sequences begin at 0, and nothing is left to replay."""
        await self._close()
        self._sequence = 0
        self._buffer.clear()
        self._open()

    async def reconnect(self, *, host: str = "") -> None:
        """The connections break; the engine lives on, perhaps at another address."""
        await self._close()
        self._host = host or self._host
        self._open()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that hears who subscribes
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self.ports = (self._bind(self._pub, self.ports[0]), self._bind(self._router, self.ports[1]))
        self._replies = asyncio.create_task(self._answer_replays())

    def _bind(self, socket: zmq.asyncio.Socket, port: int) -> int:
        socket.setsockopt(zmq.IPV6, 1)
        socket.bind(f"tcp://{self._host}:{port or '*'}")
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def _close(self) -> None:
        self._replies.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._replies
        self._context.destroy(linger=0)

    async def _answer_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            if not self.answers_replays:
                continue
            for sequence, payload in list(self._buffer):
                if sequence >= int.from_bytes(start, "big"):
                    await self._router.send_multipart((client, b"", b"kv", sequence.to_bytes(8, "big"), payload))
            await self._router.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))


def by_position(event: Event) -> list[Any]:
    """An event as older engines send it: fields in order, tag first."""
    return list(event.values())
