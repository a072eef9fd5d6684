"""What the sockets of KV events bear: names that resolve slowly or to another address, messages of many frames or without an end,
long replays."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pointsman.adapters import name_resolver
from pointsman.adapters.kv_events import reader, sockets
from pointsman.adapters.kv_events.addresses import Addresses
from pointsman.adapters.kv_events.events import EngineAttached, EngineBatch, EngineGap, EngineItem, EngineRestarted
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import (
    END_OF_REPLAY,
    FRAMES_MAX,
    EngineSockets,
    KvEndpoint,
    ReplayError,
    ZmqReplaySocket,
    shared_sockets,
)
from pointsman.adapters.tcp_ports import free_ports
from pointsman_lab.background import background
from tests.support.fake_publisher import FakePublisher, ScriptedCache
from tests.support.waiting import eventually

WAIT_SECONDS_MAX = 20.0
BATCH = msgspec.msgpack.encode([0.0, []])


class Names:
    """Of this process; libzmq, which would ask the system, knows none of them."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.asked: list[str] = []
        self.ended = Event()

    def getaddrinfo(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host == "slow.example":
            self.ended.wait(60)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        address = self.addresses[host]
        return [(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    known = Names()
    monkeypatch.setattr(socket, "getaddrinfo", known.getaddrinfo)
    yield known
    known.ended.set()


@asynccontextmanager
async def reading(
    endpoint: KvEndpoint, opened: Callable[[KvEndpoint], EngineSockets] = sockets.ZmqSockets
) -> AsyncIterator[list[EngineItem]]:
    items: list[EngineItem] = []

    async def read() -> None:
        async with aclosing(KvEventReader(endpoint, idle_check_seconds=0.2, sockets=opened).items()) as stream:
            async for item in stream:
                items.append(item)  # noqa: PERF401 - others look at them meanwhile

    async with background(read()), asyncio.timeout(WAIT_SECONDS_MAX):
        yield items


def named(publisher: FakePublisher, host: str = "tcp") -> KvEndpoint:
    """By a name that also stands in `tcp://`."""
    live, replay = publisher.ports
    return KvEndpoint(f"tcp://{host}:{live}", f"tcp://{host}:{replay}" if publisher.replay_endpoint else "")


def sequences(items: list[EngineItem]) -> list[int]:
    return [item.sequence for item in items if isinstance(item, EngineBatch)]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_zmq_gets_the_address_of_a_name(names: Names, host: str) -> None:
    names.addresses["tcp"] = host.strip("[]")
    async with FakePublisher(host=host) as publisher, reading(named(publisher)) as items:
        await publisher.publish(dropped=True)
        await publisher.subscribed()
        await publisher.publish()
        await eventually(lambda: sequences(items) == [0, 1])

        assert items[0] == EngineAttached(exact=True)


@pytest.mark.parametrize("replay", [True, False])
async def test_an_engine_that_moved_is_found_and_not_taken_for_who_is_at_its_old_address(
    names: Names, replay: bool
) -> None:
    names.addresses["tcp"] = "127.0.0.1"
    async with FakePublisher(replay=replay) as publisher, reading(named(publisher)) as items:
        await publisher.subscribed()
        await publisher.publish()
        await eventually(lambda: sequences(items) == [0])

        names.addresses["tcp"] = "127.0.0.2"
        await publisher.reconnect(host="127.0.0.2")
        async with FakePublisher(replay=replay, ports=publisher.ports) as stranger:
            for _ in range(5):
                await stranger.publish(ScriptedCache().store([9] * 4))
            await publisher.subscribed()
            await publisher.publish()
            await eventually(lambda: sequences(items) == [0, 1])

        assert not [item for item in items if isinstance(item, EngineRestarted)]


@pytest.mark.parametrize("greeting", [bytes(64), b"\xff" * 64])
async def test_an_engine_is_found_where_another_program_listened_before(greeting: bytes) -> None:
    """ZMQ gives an address up for good once a peer there speaks another protocol, or is a socket of another kind."""
    met = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with suppress(ConnectionError):
            while await reader.read(64):
                pass
        writer.close()
        met.set()

    stranger = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    async with reading(KvEndpoint(f"tcp://127.0.0.1:{port}")) as items:
        await met.wait()
        stranger.close()
        async with FakePublisher(replay=False, ports=(port, 0)) as publisher:
            await publisher.subscribed()
            await publisher.publish()
            await eventually(lambda: sequences(items) == [0])


async def test_a_name_is_looked_up_until_its_engine_answers(names: Names) -> None:
    names.addresses["tcp"] = "127.0.0.2"
    async with FakePublisher(replay=False) as publisher, reading(named(publisher)) as items:
        await eventually(lambda: len(names.asked) > 1)
        names.addresses["tcp"] = "127.0.0.1"
        await publisher.subscribed()
        await publisher.publish()
        await eventually(lambda: sequences(items) == [0])


async def test_a_name_that_resolves_slowly_holds_up_its_own_engine_alone(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_resolver, "LOOKUP_WALL_SECONDS_MAX", 0.05)
    monkeypatch.setattr(reader, "CONNECT_SECONDS_MAX", 0.2)
    names.addresses["tcp"] = "127.0.0.1"
    with shared_sockets() as opened:
        async with FakePublisher() as publisher, reading(named(publisher), opened) as items:
            await publisher.subscribed()
            async with reading(named(publisher, "slow.example"), opened) as others:
                await eventually(lambda: others, seconds=20)  # it is said that its past cannot be had
                for _ in range(3):
                    await publisher.publish()
                await eventually(lambda: sequences(items) == [0, 1, 2])

    assert others == [EngineAttached(exact=False)]
    assert names.asked.count("slow.example") == 1, "one lookup at a time"


async def test_an_address_is_kept_while_its_name_cannot_be_resolved_and_looked_up_again_when_it_can(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_resolver, "LOOKUP_WALL_SECONDS_MAX", 0.05)
    names.addresses["engine"] = "10.0.0.1"
    known = Addresses()
    assert await known.numeric("tcp://engine:1") == "tcp://10.0.0.1:1"
    del names.addresses["engine"]
    assert await known.numeric("tcp://engine:2") == "tcp://10.0.0.1:2"
    assert names.asked == ["engine"], "nobody asks while the connections hold"
    known.expire()
    assert await known.numeric("tcp://engine:1") == "tcp://10.0.0.1:1"
    names.addresses["engine"] = "fd00::1"
    known.expire()
    assert await known.numeric("tcp://engine:1") == "tcp://[fd00::1]:1"
    assert names.asked == ["engine"] * 3
    for endpoint in ("tcp://10.0.0.2:1", "tcp://[::1]:1", "ipc:///run/a:1", "inproc://engine:1"):
        assert await known.numeric(endpoint) == endpoint
    assert await known.numeric("tcp://unknown:1") == ""


async def test_a_message_of_many_frames_is_not_read_to_its_end_and_reading_goes_on() -> None:
    async with FakePublisher(replay=False) as publisher:
        async with reading(KvEndpoint(publisher.endpoint)) as items:
            await publisher.subscribed()
            await publisher.publish_frames(*[b""] * FRAMES_MAX * 100)
            await publisher.subscribed()
            await publisher.publish()
            await eventually(lambda: sequences(items) == [0])

        lost = EngineGap(0, "the connection was lost, and there is no replay socket")
        assert {type(item) for item in items} == {EngineAttached, EngineGap, EngineBatch}
        assert lost in items


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00"
"""Then the length of the type, and the type."""
MORE_FOLLOWS, LAST = b"\x03", b"\x02"

Speech = Callable[[asyncio.StreamWriter], Awaitable[None]]


def frame(flags: bytes, content: bytes) -> bytes:
    return flags + len(content).to_bytes(8, "big") + content


async def for_ever(peer: asyncio.StreamWriter) -> None:
    while True:
        peer.write(frame(MORE_FOLLOWS, bytes(65_536)))
        await peer.drain()


@asynccontextmanager
async def speaking(kind: bytes, *speeches: Speech) -> AsyncIterator[str]:
    """ZMTP byte for byte, since libzmq sends no part of a message before its end: to each connection the next speech."""
    left = list(speeches)

    async def serve(asked: asyncio.StreamReader, peer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            peer.write(GREETING)
            await asked.readexactly(len(GREETING))
            ready = READY + bytes([len(kind)]) + kind
            peer.write(bytes([4, len(ready)]) + ready)
            _, length = await asked.readexactly(2)
            await asked.readexactly(length)
            await left.pop(0)(peer)
            await asked.read()
        peer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "UNFINISHED_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(sockets, "UNFINISHED_CHECK_SECONDS", 0.05)


@pytest.mark.usefixtures("megabytes")
async def test_a_message_without_an_end_is_cut_and_reading_goes_on() -> None:
    async def properly(peer: asyncio.StreamWriter) -> None:
        peer.write(frame(MORE_FOLLOWS, b"kv") + frame(MORE_FOLLOWS, bytes(8)) + frame(LAST, BATCH))

    async with speaking(b"PUB", for_ever, properly) as endpoint, reading(KvEndpoint(endpoint)) as items:
        await eventually(lambda: sequences(items) == [0])

    assert EngineGap(0, "the connection was lost, and there is no replay socket") in items


@pytest.mark.usefixtures("megabytes")
async def test_messages_of_a_size_that_is_allowed_are_read_however_slowly_they_come() -> None:
    async def slowly(peer: asyncio.StreamWriter) -> None:
        for number in range(3):
            peer.write(frame(MORE_FOLLOWS, bytes(900_000)) + frame(MORE_FOLLOWS, number.to_bytes(8, "big")))
            await asyncio.sleep(0.2)
            peer.write(frame(LAST, BATCH))

    async with speaking(b"PUB", slowly) as endpoint, reading(KvEndpoint(endpoint)) as items:
        await eventually(lambda: sequences(items) == [0, 1, 2])

    assert not [item for item in items if isinstance(item, EngineGap)]


@pytest.mark.usefixtures("megabytes")
async def test_an_answer_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "REPLAY_FRAME_SECONDS", WAIT_SECONDS_MAX)
    async with speaking(b"ROUTER", for_ever) as endpoint:
        with zmq.asyncio.Context() as context, pytest.raises(ReplayError, match="without an end"):
            async for _ in ZmqReplaySocket(context, endpoint, Addresses()).batches(0):
                pass


async def test_an_engine_that_dies_as_it_is_asked_is_not_waited_for(tmp_path: Path) -> None:
    """Its listening socket takes a connection before the system closes it. There is nobody then to whom ZMQ could send."""
    address = tmp_path / "replay"

    async def ask(context: zmq.asyncio.Context) -> None:
        async for _ in ZmqReplaySocket(context, f"ipc://{address}", Addresses()).batches(0):
            pass

    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), address):
        with zmq.asyncio.Context() as context, pytest.raises(ReplayError):
            await asyncio.wait_for(ask(context), WAIT_SECONDS_MAX)


Answer = Callable[[bytes], AsyncIterator[list[bytes]]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[ZmqReplaySocket]:
    """To one request, message for message."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def serve() -> None:
            client, _, start = await router.recv_multipart()
            async for frames in answer(start):
                await router.send_multipart([client, b"", *frames])

        async with background(serve()):
            yield ZmqReplaySocket(context, f"tcp://127.0.0.1:{port}", Addresses())


async def test_a_replay_does_not_ask_who_takes_the_address_while_it_waits() -> None:
    live, answers = free_ports(2)

    async def replayed(context: zmq.asyncio.Context) -> list[int]:
        replay = ZmqReplaySocket(context, f"tcp://127.0.0.1:{answers}", Addresses())
        return [sequence async for sequence, _ in replay.batches(0)]

    with zmq.asyncio.Context() as context:
        asking = asyncio.create_task(replayed(context))
        await asyncio.sleep(0.2)
        async with FakePublisher(ports=(live, answers)) as stranger:
            await stranger.publish()
            with pytest.raises(ReplayError, match="no connection"):
                await asking


async def test_an_answer_of_many_frames_is_none() -> None:
    async def answer(_: bytes) -> AsyncIterator[list[bytes]]:
        yield [b""] * FRAMES_MAX * 100 + [bytes(8), b"payload"]

    async with answering(answer) as replay:
        with pytest.raises(ReplayError, match="frames"):
            async for _ in replay.batches(0):
                pass


@pytest.mark.parametrize("progresses", [True, False])
async def test_a_replay_may_take_as_long_as_it_likes_if_it_gets_on(
    monkeypatch: pytest.MonkeyPatch, progresses: bool
) -> None:
    monkeypatch.setattr(sockets, "REPLAY_SECONDS_MAX", 0.5)

    async def answer(_: bytes) -> AsyncIterator[list[bytes]]:
        for number in range(12):
            await asyncio.sleep(0.1)
            yield [(number if progresses else 0).to_bytes(8, "big"), b"payload"]
        yield [END_OF_REPLAY, b""]

    async with answering(answer) as replay:
        read: list[int] = []
        try:
            async for sequence, _ in replay.batches(0):
                read.append(sequence)
        except ReplayError:
            assert not progresses

    assert (len(read) == 12) is progresses
