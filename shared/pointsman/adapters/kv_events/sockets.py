"""ZMQ sockets to one engine: PUB subscription and replay. The Protocols let the laboratory use in-memory sockets."""

import asyncio
import contextlib
import socket as tcp
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from sys import getsizeof
from typing import Protocol, TypeVar

import zmq
import zmq.asyncio
from typing_extensions import override
from zmq.utils.monitor import parse_monitor_message

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.clocks import loop_seconds
from pointsman.adapters.kv_events.addresses import Addresses
from pointsman.adapters.kv_events.codec import PAYLOAD_BYTES_MAX
from pointsman.adapters.kv_events.continuity import SEQUENCE_BYTES
from pointsman.primitives import Seconds, Sequence, WallSeconds

RECEIVE_QUEUE_MAX = 64
"""Messages of at most PAYLOAD_BYTES_MAX: 1 GiB. Further ones wait at the engine, for 100,000 messages in vLLM; what it
drops then is a gap."""
FRAMES_MAX = 8
"""Of a message; vLLM's have at most four. RCVHWM and MAXMSGSIZE bound messages and frames, nothing the frames of a message."""
UNFINISHED_BYTES_MAX = PAYLOAD_BYTES_MAX
"""Of a message that has not ended. libzmq keeps its frames and shows none of them; 0.6 GB if they are empty."""
UNFINISHED_CHECK_SECONDS: Seconds = 0.5
BYTES_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in Linux's `tcp_info`."""
READ_AHEAD_BYTES_MAX = 64 * 1024 * 1024
"""Of a replay. vLLM's replay socket queues 1,000 batches and drops the rest, so what arrives is taken at once."""
REPLAY_FRAME_SECONDS = 2.0
"""Bound on the wait for one frame; vLLM polls its replay socket every 0.1 s."""
REPLAY_SECONDS_MAX = 30.0
"""Without a later batch."""
REPLAY_BATCHES_MAX = 1_000_000
SHARED_SOCKETS_MAX = 16_384
REDIAL_SECONDS: WallSeconds = WallSeconds(0.2)
"""Pause after a connection that ended; doubles until there is one again."""
REDIAL_SECONDS_MAX: WallSeconds = WallSeconds(2.0)
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

_Ready = TypeVar("_Ready")


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


class ReplayError(Exception):
    pass


class TooLongMessageError(Exception):
    """Its rest is not read: close the socket."""


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
        self._addresses = Addresses()
        self.live = ZmqLiveSocket(self._context, dialled(endpoint.publish), self._addresses)
        self.replay = (
            ZmqReplaySocket(self._context, dialled(endpoint.replay), self._addresses) if endpoint.replay else None
        )

    @override
    def close(self) -> None:
        self.live.close()
        if self._own is not None:
            self._own.destroy(linger=0)


class ZmqLiveSocket(LiveSocket):
    """ZMQ repeats a connection that is refused. After one that ended it goes back to the address, which may be another engine's
    by then, or never, if the peer was none of its kind. So the socket is replaced and the name looked up again."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, addresses: Addresses) -> None:
        self._context = context
        self._endpoint = endpoint
        self._addresses = addresses
        self._given_up = False
        self._backoff = Backoff(REDIAL_SECONDS, REDIAL_SECONDS_MAX)
        self._redial_at: Seconds = 0.0
        self._open()

    @override
    async def connected(self, seconds: Seconds) -> None:
        deadline = loop_seconds() + seconds
        while not self._connected and (left := deadline - loop_seconds()) > 0:
            await self.arrival(min(left, 1.0))
            self.interrupted()

    @override
    def interrupted(self) -> bool:
        interrupted, self._given_up = self._given_up, False
        with contextlib.suppress(zmq.Again):
            while True:
                told = parse_monitor_message(self._connections.recv_multipart(zmq.NOBLOCK))
                if told["event"] == zmq.EVENT_CONNECTED:
                    self._unfinished.descriptor = told["value"]
                    continue
                interrupted = True
                if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                    self._backoff.reset()
                else:
                    self._hang_up()
        return interrupted

    @override
    async def arrival(self, seconds: Seconds) -> bool:
        """Returns early when the connection changes."""
        if not self._connected:
            await self._dial()
        try:
            return self._socket in dict(await self._unfinished.polled(self._poller.poll, seconds))
        except TooLongMessageError:
            self._give_up()
            return False

    @override
    def receive(self) -> list[bytes] | None:
        try:
            message = _message(self._queue)
        except zmq.Again:
            return None
        except TooLongMessageError:
            self._give_up()
            return None
        self._unfinished.begin()
        return message

    @override
    def discard(self) -> None:
        for _ in range(RECEIVE_QUEUE_MAX):
            if self.receive() is None:
                return

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        _set_options(self._socket)
        for option, value in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1_000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.subscribe(b"")
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(events)
        self._queue: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._connections: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._address = ""
        self._connected = False
        self._unfinished: _UnfinishedMessage = _UnfinishedMessage()

    async def _dial(self) -> None:
        await asyncio.sleep(max(0.0, self._redial_at - loop_seconds()))
        self._addresses.expire()
        address = await self._addresses.numeric(self._endpoint)
        if address in ("", self._address):
            return
        if self._address:
            self._hang_up()
        self._socket.connect(address)
        self._address = address

    def _give_up(self) -> None:
        self._hang_up()
        self._given_up = True

    def _hang_up(self) -> None:
        self.close()
        self._open()
        self._addresses.expire()
        self._redial_at = loop_seconds() + float(self._backoff.next_wait())


class ZmqReplaySocket(ReplaySocket):
    """One connection per request, so a late answer cannot be mistaken for the next."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, addresses: Addresses) -> None:
        self._context = context
        self._endpoint = endpoint
        self._addresses = addresses

    @override
    async def batches(self, start: Sequence) -> AsyncGenerator[tuple[Sequence, bytes], None]:
        address = await self._addresses.numeric(self._endpoint)
        if not address:
            raise ReplayError("the name has no address")
        deadline, newest, ended = loop_seconds() + REPLAY_SECONDS_MAX, -1, False
        socket = self._context.socket(zmq.DEALER)
        connections: zmq.asyncio.Socket = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        try:
            _set_options(socket)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: another engine may take the address meanwhile
            socket.connect(address)
            if not await connections.poll(int(REPLAY_FRAME_SECONDS * 1000)):
                raise ReplayError("no connection in time")
            connected = parse_monitor_message(await connections.recv_multipart())
            answer = _Answer(socket, _UnfinishedMessage(connected["value"]))
            answer.request(start)
            for _ in range(REPLAY_BATCHES_MAX):
                number, payload = await answer.next_batch(deadline)
                if number == END_OF_REPLAY:
                    ended = True
                    return
                sequence = int.from_bytes(number, "big")
                yield sequence, payload
                if sequence > newest:
                    deadline, newest = loop_seconds() + REPLAY_SECONDS_MAX, sequence
            raise ReplayError(f"more than {REPLAY_BATCHES_MAX} batches")
        finally:
            socket.disable_monitor()
            connections.close(linger=0)
            socket.close(linger=0)
            if not ended:
                self._addresses.expire()


class _Answer:
    """Of a replay socket, read ahead of its use within READ_AHEAD_BYTES_MAX."""

    def __init__(self, socket: zmq.asyncio.Socket, unfinished: "_UnfinishedMessage") -> None:
        self._socket = socket
        self._unfinished = unfinished
        self._queue: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._ahead: deque[list[bytes]] = deque()
        self._bytes = 0

    def request(self, start: Sequence) -> None:
        """Does not wait: where the connection was lost meanwhile, there is nobody to send to, ever."""
        try:
            self._queue.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        except zmq.Again as error:
            raise ReplayError("the connection was lost") from error

    async def next_batch(self, deadline: Seconds) -> tuple[bytes, bytes]:
        """Sequence and payload are the last frames; those before (delimiter, topic) differ between versions."""
        seconds = min(REPLAY_FRAME_SECONDS, deadline - loop_seconds())
        try:
            self._read_ahead()
            if not self._ahead and seconds > 0:
                self._unfinished.begin()
                await self._unfinished.polled(self._socket.poll, seconds)
                self._read_ahead()
        except TooLongMessageError as error:
            raise ReplayError(str(error)) from error
        if not self._ahead or seconds <= 0:
            raise ReplayError("no answer in time")
        frames = self._ahead.popleft()
        self._bytes -= sum(map(getsizeof, frames))
        if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
            raise ReplayError(f"an answer of {len(frames)} frames without a sequence")
        return frames[-2], frames[-1]

    def _read_ahead(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(RECEIVE_QUEUE_MAX):
                if self._bytes >= READ_AHEAD_BYTES_MAX:
                    return
                frames = _message(self._queue)
                self._ahead.append(frames)
                self._bytes += sum(map(getsizeof, frames))


class _UnfinishedMessage:
    """What libzmq has received of the next message and does not show. `descriptor`: of the connection; -1 if there is none."""

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        self._begins_at = 0

    def begin(self) -> None:
        """The message before was read."""
        self._begins_at = _received_bytes(self.descriptor)

    async def polled(self, poll: Callable[[int], Awaitable[_Ready]], seconds: Seconds) -> _Ready:
        """As `poll` of so many seconds. Raises TooLongMessageError."""
        deadline = loop_seconds() + seconds
        while True:
            wait = max(0.0, min(deadline - loop_seconds(), UNFINISHED_CHECK_SECONDS))
            ready = await poll(int(wait * 1000))
            if ready or wait < UNFINISHED_CHECK_SECONDS:
                return ready
            if _received_bytes(self.descriptor) - self._begins_at > UNFINISHED_BYTES_MAX:
                raise TooLongMessageError(f"more than {UNFINISHED_BYTES_MAX} bytes without an end")


def _received_bytes(descriptor: int) -> int:
    """Of a TCP connection; 0 for others, for one that libzmq has closed, and where the system does not count."""
    if sys.platform != "linux" or descriptor < 0:
        return 0
    try:
        connection = tcp.socket(fileno=descriptor)
        try:
            counts = connection.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, BYTES_RECEIVED_AT + 8)
        finally:
            connection.detach()
        return int(struct.unpack_from("=Q", counts, BYTES_RECEIVED_AT)[0])
    except (OSError, struct.error):
        return 0


def _message(queue: zmq.Socket[bytes]) -> list[bytes]:
    """Raises zmq.Again and TooLongMessageError."""
    frames = [queue.recv(zmq.NOBLOCK)]
    while queue.getsockopt(zmq.RCVMORE):
        if len(frames) == FRAMES_MAX:
            raise TooLongMessageError(f"more than {FRAMES_MAX} frames")
        frames.append(queue.recv(zmq.NOBLOCK))
    return frames


def _set_options(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.IPV6, 1)  # IPv4 as well
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
