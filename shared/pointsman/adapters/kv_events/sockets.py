"""ZMQ sockets to one engine: PUB subscription and replay. The Protocols let the laboratory use in-memory sockets."""

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from typing_extensions import override

from pointsman.adapters.clocks import loop_seconds
from pointsman.adapters.kv_events.codec import PAYLOAD_BYTES_MAX
from pointsman.adapters.kv_events.continuity import SEQUENCE_BYTES
from pointsman.primitives import Seconds, Sequence

RECEIVE_QUEUE_MAX = 64
"""Messages of at most PAYLOAD_BYTES_MAX: 1 GiB. Further ones wait at the engine, for 100,000 messages in vLLM; what it
drops then is a gap."""
READ_AHEAD_BYTES_MAX = 64 * 1024 * 1024
"""Of a replay. vLLM's replay socket queues 1,000 batches and drops the rest, so what arrives is taken at once."""
REPLAY_FRAME_SECONDS = 2.0
"""Bound on the wait for one frame; vLLM polls its replay socket every 0.1 s."""
REPLAY_SECONDS_MAX = 30.0
REPLAY_BATCHES_MAX = 1_000_000
SHARED_SOCKETS_MAX = 16_384
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Addresses of one data-parallel rank. Without `replay` nothing missed can be recovered."""

    publish: str
    replay: str = ""


def dialled(endpoint: str) -> str:
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:"):
        if endpoint.startswith(wildcard):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(wildcard)
    return endpoint


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Each rank takes the next port after rank 0's. Raises ValueError without a port."""
    if not endpoint or dp_rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        msg = f"{endpoint!r} has no port, so rank {dp_rank} has no endpoint: engines with ranks publish on tcp://"
        raise ValueError(msg)
    return f"{address}:{int(port) + dp_rank}"


class ReplayError(Exception):
    pass


class LiveSocket(Protocol):
    async def connected(self, seconds: Seconds) -> None:
        """Wait at most `seconds` for the first connection, which is not an interruption."""
        ...

    def interrupted(self) -> bool: ...

    async def arrival(self, seconds: Seconds) -> bool: ...

    def receive(self) -> list[bytes] | None: ...

    def discard(self) -> None: ...


class ReplaySocket(Protocol):
    def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        """Sequence and payload of each batch from `start` on that the engine still has. Raises ReplayError."""
        ...


class EngineSockets(Protocol):
    live: LiveSocket
    replay: ReplaySocket | None

    def close(self) -> None: ...


@contextlib.contextmanager
def shared_sockets() -> Iterator[Callable[[KvEndpoint], EngineSockets]]:
    """Opens the sockets of many engines in one context, whose two threads serve them all."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, SHARED_SOCKETS_MAX)
    try:
        yield lambda endpoint: ZmqSockets(endpoint, context)
    finally:
        context.destroy(linger=0)


class ZmqSockets(EngineSockets):
    def __init__(self, endpoint: KvEndpoint, shared: zmq.asyncio.Context | None = None) -> None:
        """Close a generator of `replay` before `close` if the context is shared."""
        self._own = zmq.asyncio.Context() if shared is None else None
        self._context = shared or self._own
        assert self._context is not None
        self.live = ZmqLiveSocket(self._context, dialled(endpoint.publish))
        self.replay = ZmqReplaySocket(self._context, dialled(endpoint.replay)) if endpoint.replay else None

    @override
    def close(self) -> None:
        self.live.close()
        if self._own is not None:
            self._own.destroy(linger=0)


class ZmqLiveSocket(LiveSocket):
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = context.socket(zmq.SUB)
        _set_options(self._socket)
        for option, value in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1_000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.subscribe(b"")
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(events)
        self._queue: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._connections: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._socket.connect(address)

    @override
    async def connected(self, seconds: Seconds) -> None:
        await self._monitor.poll(int(seconds * 1000))
        self.interrupted()

    @override
    def interrupted(self) -> bool:
        interrupted = False
        with contextlib.suppress(zmq.Again):
            while True:
                self._connections.recv_multipart(zmq.NOBLOCK)
                interrupted = True
        return interrupted

    @override
    async def arrival(self, seconds: Seconds) -> bool:
        return bool(await self._socket.poll(int(seconds * 1000)))

    @override
    def receive(self) -> list[bytes] | None:
        try:
            return self._queue.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    @override
    def discard(self) -> None:
        for _ in range(RECEIVE_QUEUE_MAX):
            if self.receive() is None:
                return

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class ZmqReplaySocket(ReplaySocket):
    """One connection per request, so a late answer cannot be mistaken for the next."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._context = context
        self._address = address

    @override
    async def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        deadline = loop_seconds() + REPLAY_SECONDS_MAX
        socket = self._context.socket(zmq.DEALER)
        try:
            _set_options(socket)
            socket.connect(self._address)
            answer = _Answer(socket)
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            for _ in range(REPLAY_BATCHES_MAX):
                sequence, payload = await answer.next_batch(deadline)
                if sequence == END_OF_REPLAY:
                    return
                yield int.from_bytes(sequence, "big"), payload
            msg = f"more than {REPLAY_BATCHES_MAX} batches"
            raise ReplayError(msg)
        finally:
            socket.close(linger=0)


class _Answer:
    """Of a replay socket, read ahead of its use within READ_AHEAD_BYTES_MAX."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._queue: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._ahead: deque[list[bytes]] = deque()
        self._bytes = 0

    async def next_batch(self, deadline: Seconds) -> tuple[bytes, bytes]:
        """Sequence and payload are the last frames; those before (delimiter, topic) differ between versions."""
        seconds = min(REPLAY_FRAME_SECONDS, deadline - loop_seconds())
        self._read_ahead()
        if seconds <= 0 or not (self._ahead or await self._socket.poll(int(seconds * 1000))):
            msg = "no answer in time"
            raise ReplayError(msg)
        if not self._ahead:
            self._read_ahead()
        frames = self._ahead.popleft()
        self._bytes -= sum(map(len, frames))
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            msg = f"an answer of {len(frames)} frames without a sequence"
            raise ReplayError(msg)
        return frames[-2], frames[-1]

    def _read_ahead(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(RECEIVE_QUEUE_MAX):
                if self._bytes >= READ_AHEAD_BYTES_MAX:
                    return
                frames = self._queue.recv_multipart(zmq.NOBLOCK)
                self._ahead.append(frames)
                self._bytes += sum(map(len, frames))


def _set_options(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.IPV6, 1)  # IPv4 as well
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
