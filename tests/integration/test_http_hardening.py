"""What a client may do to a connection, over real sockets: heads, slowness, ambiguity, old HTTP."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pointsman.runtime import http_protocol
from pointsman.runtime.health import HttpServer, send_whole
from pointsman.runtime.http_protocol import CLOSE_NOW, HttpLimits, network_of
from tests.support.waiting import eventually

HOST = b"host: x\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
LARGE = 64 << 20
"""More than the system's buffers hold."""


class Server:
    """An application that echoes bodies, streams `/stream`, holds `/held` until it is let go, and gives to `/unread` a
    little more than the system's buffers take."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        """Of each request, once its body was read."""
        self.go = asyncio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        if scope["path"] == "/refuse":
            await send_whole(send, 413, b"no", "text/plain")
            return
        if scope["path"] == "/large":
            await send_whole(send, 200, b"x" * LARGE, "text/plain")
            return
        if scope["path"] == "/unread":
            transport = scope[CLOSE_NOW].__self__.transport
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not transport.get_write_buffer_size():
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.headers.append(list(scope["headers"]))
        if scope["path"] == "/held":
            await self.go.wait()
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one,", b"two,", b"three"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send_whole(send, 200, b"<" + body + b">", "text/plain")


@asynccontextmanager
async def serving(*, keep_alive_seconds: int = 75, **limits: Any) -> AsyncIterator[Server]:
    server = Server()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await server.app(scope, receive, send)

    http = HttpServer(
        app,
        host="127.0.0.1",
        port=0,
        shutdown_seconds=1,
        keep_alive_seconds=keep_alive_seconds,
        limits=HttpLimits(**limits),
    )
    running = asyncio.create_task(http.serve())
    await eventually(lambda: http.started)
    server.port = http.bound_port
    try:
        yield server
    finally:
        http.should_exit = True
        await running


async def told(server: Server, *pieces: bytes, ends: bool = False) -> bytes:
    """Everything that the server says until it closes. `ends`: it does not, by itself; one answer is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that it arrives as a piece of its own
        async with asyncio.timeout(20):
            return await reader.readuntil(b">") if ends else await reader.read()
    finally:
        writer.close()


def status(answer: bytes) -> int:
    return int(answer[9:12])


def refused(reason: str) -> float:
    return REGISTRY.get_sample_value("pointsman_http_connections_refused_total", {"reason": reason}) or 0.0


async def test_a_long_head_is_refused_in_one_piece_and_in_many() -> None:
    async with serving() as server:
        field = b"x-long: " + b"a" * 40_000
        whole = await told(server, GET[:-2] + field + b"\r\n\r\n")
        pieces = await told(server, GET[:-2] + b"x-long: ", *[b"a" * 50_000] * 8)
        url = await told(server, b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n")

    assert [status(answer) for answer in (whole, pieces, url)] == [431, 431, 431]
    assert server.asked == []


async def test_a_hundred_headers_are_served_and_one_more_is_refused() -> None:
    async with serving() as server:
        headers = [b"x-%d: 1\r\n" % number for number in range(99)]
        served = await told(server, GET[:-2] + b"".join(headers) + b"\r\n", ends=True)
        too_many = await told(server, GET[:-2] + b"".join([*headers, b"y: 1\r\n"]) + b"\r\n")
        unfinished = await told(server, GET[:-2] + b"".join(headers) * 10)

    assert (status(served), status(too_many), status(unfinished)) == (200, 431, 431)


async def test_a_large_body_behind_a_split_head_is_no_long_head() -> None:
    async with serving() as server:
        body = b"b" * 300_000
        head = b"POST / HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(body)
        answer = await told(server, head[:30], head[30:] + body, ends=True)

    assert answer.endswith(b"<" + body + b">")


CHUNKED = b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "trailers": (b"0\r\n", b"a:b\r\n" * 1000),
    "one trailer": (b"0\r\na: ", b"b" * 50_000),
    "the extension of a chunk": (b"5;a=", b"b" * 50_000),
}
"""What comes in the server's first read, of 256 KiB at most, does not count yet."""


@pytest.mark.parametrize("of", ENDLESS)
async def test_a_body_has_no_more_trailers_than_a_head_has_headers(of: str) -> None:
    begin, more = ENDLESS[of]
    async with serving() as server:
        answer = await told(server, CHUNKED + b"5\r\nhello\r\n" + begin, *[more] * 8)

    assert status(answer) == 431
    assert server.headers == []


async def test_trailers_are_no_headers_and_a_body_in_many_chunks_has_few_of_them() -> None:
    chunks = [b"1\r\nx\r\n" * 5000] * 8
    async with serving() as server:
        answer = await told(server, CHUNKED, *chunks, b"0\r\nauthorization: me\r\nx: y\r\n\r\n", ends=True)

    assert answer.endswith(b"<" + b"x" * 40_000 + b">")
    assert server.headers == [[(b"host", b"x"), (b"transfer-encoding", b"chunked")]]


async def test_a_read_full_of_small_chunks_is_the_last_one_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "CHUNK_REST_SECONDS", 3600.0)
    async with serving() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")  # more than one read
        await eventually(lambda: bool(server.asked))
        larger = [b"64\r\n%b\r\n" % (b"x" * 100) * 500] * 4
        others = [await told(server, CHUNKED, *larger, b"0\r\n\r\n", ends=True) for _ in range(2)]
        writer.transport.abort()

    assert [status(answer) for answer in others] == [200, 200]
    assert len(server.headers) == 2


async def test_an_unfinished_head_gets_408_and_a_silent_connection_is_closed() -> None:
    async with serving(keep_alive_seconds=1, head_seconds=0.3) as server:
        half, lines, silent = await asyncio.gather(
            told(server, b"GET / HTTP/1.1\r\nhos"), told(server, b"\r\n\r\n"), told(server)
        )

    assert status(half) == status(lines) == 408
    assert silent == b""


async def test_dripping_keeps_no_connection_alive() -> None:
    async with serving(keep_alive_seconds=1, head_seconds=0.3, unread_seconds=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n")
        drips = 0
        while not reader.at_eof() and drips < 200:
            writer.write(b"a: b\r\n")
            drips += 1
            await asyncio.sleep(0.05)
            if reader._buffer or reader.at_eof():  # type: ignore[attr-defined]
                break
        assert status(await reader.read()) == 408
        writer.close()

    assert drips < 200


async def test_an_idle_connection_is_closed_after_the_keep_alive_time_and_not_before_it_was_used() -> None:
    async with serving(keep_alive_seconds=1) as server:
        answer = await told(server, GET, GET)

    assert answer.count(b"200 OK") == 2


NOT_HTTP = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1, 1\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +1\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0x1\r\n\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-1\r\na",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1 \r\naXX",
    b"GET / HTTP/1.1\nhost: x\r\n x: folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\rx: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nna me: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nname\x00: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nname: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\n: empty\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET /\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"CONNECT host:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"G\xc3\x89T / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
]


async def test_what_is_ambiguous_or_no_http_gets_400_and_the_connection_ends() -> None:
    async with serving() as server:
        answers = {request: await told(server, request) for request in NOT_HTTP}

    for request, answer in answers.items():
        assert answer.count(b"HTTP/1.1") == 1, (request, answer)
        assert status(answer) == 400, (request, answer)


async def test_a_client_of_http_1_0_gets_streams_without_chunks() -> None:
    async with serving() as server:
        stream = await told(server, b"GET /stream HTTP/1.0\r\n\r\n")
        kept = await told(server, b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi")

    head, _, body = stream.partition(b"\r\n\r\n")
    assert body == b"one,two,three"
    assert b"transfer-encoding" not in head
    assert kept.endswith(b"<hi>")


@pytest.mark.parametrize("pieces", [1, 3, 50])
async def test_an_offer_to_upgrade_is_ignored_and_the_request_served(pieces: int) -> None:
    offer = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi"
    size = -(-len(offer) // pieces)
    async with serving(keep_alive_seconds=1) as server:
        answer = await told(server, *[offer[at : at + size] for at in range(0, len(offer), size)], GET)

    assert answer.count(b"200 OK") == 2
    assert b"<hi>" in answer


async def test_a_malformed_request_behind_one_that_is_being_answered_puts_nothing_into_its_answer() -> None:
    async with serving() as server:
        answer = await told(server, GET.replace(b"/ ", b"/held "), b"\x00\x00")

    assert answer == b""


async def test_pipelined_requests_are_answered_in_order_and_bounded() -> None:
    async with serving(pipelined=4) as server:
        server.go.set()
        few = await told(server, b"".join(GET.replace(b"/ ", b"/%d " % n) for n in range(4)) + GET, ends=True)
        server.go.clear()
        many = await told(server, GET.replace(b"/ ", b"/held "), GET * 100)

    assert few
    assert server.asked[:5] == ["/0", "/1", "/2", "/3", "/"]
    assert many == b""


@pytest.mark.parametrize("waiting", ["bodies", "heads"])
async def test_requests_that_wait_for_an_answer_before_them_are_bounded_in_bytes(waiting: str) -> None:
    field = b"x: %b\r\n" % (b"a" * 20_000) if waiting == "heads" else b""
    body = b"b" * (0 if waiting == "heads" else 20_000)
    post = b"POST / HTTP/1.1\r\n" + HOST + field + b"content-length: %d\r\n\r\n" % len(body) + body
    held = GET.replace(b"/ ", b"/held ")
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(held + post * 3)
        await eventually(lambda: server.asked)
        server.go.set()
        for _ in range(4):
            assert status(await reader.readuntil(b">")) == 200
        server.go.clear()
        writer.write(held)
        await eventually(lambda: server.asked[-1] == "/held")
        writer.write(post * 4)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 15)
        writer.close()

    assert answer == b""
    assert server.asked == ["/held", "/", "/", "/", "/held"]


@pytest.mark.parametrize("ends", ["asked to close", "sends no HTTP", "sends no more"])
async def test_a_connection_that_closes_does_not_wait_for_a_client_that_reads_nothing(ends: str) -> None:
    close = b"connection: close\r\n" if ends == "asked to close" else b""
    async with serving(send_seconds=0.3, unread_seconds=0.1) as server:
        before = refused("answer_unread")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            await asyncio.to_thread(client.sendall, b"GET /unread HTTP/1.1\r\n" + HOST + close + b"\r\n")
            await eventually(lambda: server.asked)
            if ends == "sends no HTTP":
                client.sendall(b"?\r\n\r\n")
            if ends == "sends no more":
                client.shutdown(socket.SHUT_WR)
            await eventually(lambda: refused("answer_unread") == before + 1)


async def test_a_body_that_goes_on_after_its_refusal_is_read_for_a_while_only() -> None:
    async with serving(keep_alive_seconds=1, unread_seconds=0.3) as server:
        answer = await told(server, b"POST /refuse HTTP/1.1\r\n" + HOST + b"content-length: 9999\r\n\r\n", b"a", b"b")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /refuse HTTP/1.1\r\n" + HOST + b"content-length: 3\r\n\r\n")
        assert status(await reader.readuntil(b"\r\n\r\nno")) == 413
        writer.write(b"abc" + GET)
        assert status(await reader.readuntil(b">")) == 200
        writer.write(b"POST /refuse HTTP/1.1\r\n" + HOST + b"content-length: 3\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nno")
        writer.write(b"abc")
        assert await reader.read() == b""  # idle from then on
        writer.close()

    assert status(answer) == 413


async def test_one_connection_too_many_costs_the_longest_idle_one_or_itself() -> None:
    evicted_before, refused_before = refused("idle_evicted"), refused("connections")
    async with serving(connections=2) as server:
        first, first_writer = await asyncio.open_connection("127.0.0.1", server.port)
        busy, busy_writer = await asyncio.open_connection("127.0.0.1", server.port)
        busy_writer.write(GET.replace(b"/ ", b"/held "))
        await eventually(lambda: server.asked)
        third, third_writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await first.read() == b""
        third_writer.write(GET.replace(b"/ ", b"/held "))
        await eventually(lambda: len(server.asked) == 2)
        fourth = await told(server)
        server.go.set()
        served = [await reader.readuntil(b">") for reader in (busy, third)]
        for writer in (first_writer, busy_writer, third_writer):
            writer.close()

    assert status(fourth) == 503
    assert [status(answer) for answer in served] == [200, 200]
    assert (refused("idle_evicted") - evicted_before, refused("connections") - refused_before) == (1, 1)


async def test_incomplete_heads_make_room_for_a_new_connection() -> None:
    before = refused("opening_evicted")
    async with serving(connections=3) as server:
        slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        for _, writer in slow:
            writer.write(b"GET / HTTP/1.1\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        served = await told(server, GET, ends=True)
        first = await slow[0][0].read() if slow[0][0].at_eof() else b"open"
        slow[1][1].write(HOST + b"\r\n")
        also = await slow[1][0].readuntil(b">")
        for _, writer in slow:
            writer.close()

    assert (status(served), first, status(also)) == (200, b"", 200)
    assert refused("opening_evicted") == before + 1


async def test_one_address_has_a_bound_of_its_own_and_others_are_served() -> None:
    before = refused("connections_per_address")
    async with serving(connections_per_address=2) as server:
        open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        third = await told(server)
        other, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
        writer.write(GET)
        served = await other.readuntil(b">")
        for _, each in (*open_ones, (other, writer)):
            each.close()
        assert refused("connections_per_address") == before + 1

        async def is_served() -> bool:
            return status(await told(server, GET.replace(b"host", b"connection: close\r\nhost"))) == 200

        await eventually(is_served)

    assert (status(third), status(served)) == (503, 200)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:0db8:0000:0000"),
        ("fe80::1%eth0", "fe80:0000:0000:0000"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_of_ipv6_is_its_network(host: str, network: str) -> None:
    assert network_of(host) == network


async def test_an_answer_to_a_connection_that_is_closing_is_dropped_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(GET.replace(b"/ ", b"/held "))
            await eventually(lambda: server.asked)
            server.asked.clear()
            server.go.set()
            writer.transport.abort()
            server.go = asyncio.Event()
        await asyncio.sleep(0.1)

    assert caplog.records == []


async def test_who_does_not_read_an_answer_is_let_go() -> None:
    async with serving(send_seconds=0.3) as server:
        before, read = refused("answer_unread"), 0
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 16)
        writer.write(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")

        await eventually(lambda: refused("answer_unread") == before + 1)
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                read += len(part)
        writer.close()

    assert read < LARGE


@pytest.mark.parametrize("head", [b"connection: close\r\n", b""])
async def test_who_reads_slowly_gets_the_whole_answer(head: bytes) -> None:
    """For longer than `send_seconds`, which each part has. Then the connection is idle."""
    async with serving(send_seconds=2.0, keep_alive_seconds=1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
        writer.write(b"GET /large HTTP/1.1\r\n" + head + HOST + b"\r\n")
        read = 0
        while part := await reader.read(1 << 20):
            read += len(part)
            await asyncio.sleep(0.05)
        writer.close()

    assert read > LARGE


async def test_who_does_not_read_the_rest_of_an_answer_is_no_idle_connection_for_long() -> None:
    async with serving(send_seconds=0.3, keep_alive_seconds=1) as server:
        before = refused("answer_unread")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 16)
        writer.write(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        await reader.read(1 << 16)

        await eventually(lambda: refused("answer_unread") == before + 1)
        writer.close()
