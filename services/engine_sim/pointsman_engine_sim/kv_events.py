"""KV events on ZMQ, as vLLM 0.24 and later. PUB: `[topic, sequence (8 bytes, big-endian), msgpack [ts, [event maps],
rank]]`. Replay, a ROUTER: `[empty, first sequence]` gets `[empty, sequence, payload]` per batch still buffered, then
sequence -1."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec
import structlog
import zmq
import zmq.asyncio

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.block_cache import BlocksEvicted, CacheChange, CacheReset, RunCached

log = structlog.get_logger()

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"
OFFLOADED_MEDIUM = "CPU"


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """Empty means disabled. Raises ValueError."""
    if not text:
        return KvEventsConfig()
    try:
        return msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ValueError(f"--kv-events-config: {error}") from error


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class BlockStored(_Event, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event, frozen=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event, frozen=True):
    pass


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class EventFaults:
    """Drops every N-th batch: on the wire (`drop_every`) or for good (`lose_every`). 0: never."""

    drop_every: int = 0
    lose_every: int = 0


class EventEncoder:
    def __init__(self, *, block_size: Tokens) -> None:
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()

    def payload(self, changes: Iterable[CacheChange], at: EngineSeconds) -> bytes:
        return self._encoder.encode(EventBatch(at, [self._event(change) for change in changes], 0))

    def _event(self, change: CacheChange) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match change:
            case RunCached():
                return self._stored(change) if change.tier == "device" else _offloaded(change)
            case BlocksEvicted():
                medium = MEDIUM if change.tier == "device" else OFFLOADED_MEDIUM
                return BlockRemoved(list(change.hashes), medium, group_idx=0)
            case CacheReset():
                return AllBlocksCleared()
            case _:
                assert_never(change)

    def _stored(self, run: RunCached) -> BlockStored:
        later = run.identity.extra_keys(first_block=False)
        extra_keys = [later] * len(run.hashes)
        if run.parent is None:
            extra_keys[0] = run.identity.extra_keys(first_block=True)
        return BlockStored(
            block_hashes=list(run.hashes),
            parent_block_hash=run.parent,
            token_ids=list(run.tokens),
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=run.identity.lora or None,
            extra_keys=extra_keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )


def _offloaded(run: RunCached) -> BlockStored:
    """As vLLM's OffloadingConnector: by hash alone."""
    return BlockStored(
        block_hashes=list(run.hashes),
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=OFFLOADED_MEDIUM,
        lora_name=None,
        group_idx=0,
    )


class KvEventPublisher:
    def __init__(self, config: KvEventsConfig, *, block_size: Tokens, faults: EventFaults = EventFaults()) -> None:
        """Binds or connects. Raises OSError."""
        self._config = config
        self._encoder = EventEncoder(block_size=block_size)
        self._faults = faults
        self._topic = config.topic.encode()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.asyncio.Context()
        self._publisher: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUB)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self._open_publisher()
            self._open_replay()
        except zmq.ZMQError as error:
            self._close()
            raise OSError(f"KV events at {config.endpoint} and {config.replay_endpoint}: {error.strerror}") from error

    @property
    def endpoint(self) -> str:
        return _address(self._publisher)

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay is None else _address(self._replay)

    def publish(self, changes: Iterable[CacheChange]) -> None:
        payload = self._encoder.payload(changes, time.time())
        sequence = self._sequence
        self._sequence += 1
        if _is_nth(sequence, self._faults.lose_every):
            return
        self._buffer.append((sequence, payload))
        if not _is_nth(sequence, self._faults.drop_every):
            self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def run(self) -> None:
        try:
            while True:
                await self._answer_one()
        finally:
            self._close()

    async def _answer_one(self) -> None:
        if self._replay is None:
            await asyncio.Event().wait()
            return
        frames = await self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("replay_request_invalid", frames=len(frames))
            return
        client, _, start = frames
        await self._replay_from(client, int.from_bytes(start, "big"))

    async def _replay_from(self, client: bytes, first: int) -> None:
        assert self._replay is not None
        for sequence, payload in list(self._buffer):
            if sequence >= first:
                await self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        await self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _open_publisher(self) -> None:
        self._publisher.set_hwm(self._config.hwm)
        endpoint = self._config.endpoint
        if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            self._publisher.bind(endpoint)
        else:
            self._publisher.connect(endpoint)

    def _open_replay(self) -> None:
        """A ROUTER drops messages beyond the client's queue, so it must hold the whole buffer."""
        if not self._config.replay_endpoint:
            return
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(0)
        self._replay.bind(self._config.replay_endpoint)

    def _close(self) -> None:
        for socket in (self._publisher, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()


def _address(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> str:
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint.replace("://0.0.0.0:", "://127.0.0.1:")


def _is_nth(sequence: int, every: int) -> bool:
    return every > 0 and (sequence + 1) % every == 0
