"""What goes to an engine past aiohttp's client: the head is ours, and a header never ends early."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from pointsman_ingress.engine.client import open_session
from pointsman_ingress.engine.session import DirectSession


@pytest.fixture
async def engine() -> AsyncIterator[tuple[URL, list[web.Request]]]:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(text=f"{request.headers} {await request.text()}", headers={"x-kept": "a"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield server.make_url("/v1/chat/completions"), seen


async def test_the_engine_gets_what_aiohttp_would_send(engine: tuple[URL, list[web.Request]]) -> None:
    url, seen = engine
    headers = {"content-type": "application/json", "x-request-id": "7"}
    async with open_session() as session:
        answer = await DirectSession(session).post(url, b'{"a":1}', headers)
        ours = await answer.content.read()
        async with session.post(url, data=b'{"a":1}', headers=headers) as theirs:
            assert theirs.status == answer.status == 200
            assert answer.headers["x-kept"] == "a"
        assert ours

    one, other = ({name.lower(): value for name, value in request.headers.items()} for request in seen)
    assert one == other


async def test_an_answer_that_was_read_gives_its_connection_back(engine: tuple[URL, list[web.Request]]) -> None:
    url, seen = engine
    async with open_session() as session:
        direct = DirectSession(session)
        for _ in range(3):
            answer = await direct.post(url, b"{}", {})
            await answer.content.read()
            assert answer.connection is None

    assert len({id(request.protocol) for request in seen}) == 1


async def test_an_answer_that_is_closed_early_closes_its_connection(engine: tuple[URL, list[web.Request]]) -> None:
    url, _ = engine
    async with open_session() as session:
        answer = await DirectSession(session).post(url, b"{}", {})
        answer.close()

        assert answer.connection is None


@pytest.mark.parametrize("value", ["a\r\nx-other: b", "a\nb", "a\rb", "a\0b"])
async def test_a_header_with_a_line_end_is_refused(value: str, engine: tuple[URL, list[web.Request]]) -> None:
    url, seen = engine
    async with open_session() as session:
        with pytest.raises(ValueError, match="line end"):
            await DirectSession(session).post(url, b"{}", {"x-request-id": value})

    assert not seen


async def test_what_is_no_http_is_an_error_of_the_client_library() -> None:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with open_session() as session:
        with pytest.raises(aiohttp.ClientError):
            await DirectSession(session).post(URL(f"http://127.0.0.1:{port}/"), b"{}", {})
    server.close()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def engine_saying(*parts: bytes, then_for_ever: bytes = b"", stays: bool = False) -> AsyncIterator[URL]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.writelines(parts)
            while then_for_ever:
                writer.write(then_for_ever)
                await writer.drain()
            await writer.drain()
            if stays:
                await reader.read()
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    yield URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    server.close()
    if stays:
        await ended.wait()


async def posted(session: aiohttp.ClientSession, url: URL, *, direct: bool) -> bytes:
    if direct:
        answer = await DirectSession(session).post(url, b"{}", {})
        try:
            return await answer.content.read()
        finally:
            answer.close()
    async with session.post(url, data=b"{}") as answer:
        return await answer.read()


@pytest.mark.parametrize("direct", [True, False])
async def test_an_engine_that_only_says_continue_is_left_at_once_and_holds_up_nobody(*, direct: bool) -> None:
    async with engine_saying(then_for_ever=CONTINUE * 2000) as url, open_session() as session, asyncio.timeout(5):
        with pytest.raises(aiohttp.ClientPayloadError, match="1xx"):
            await posted(session, url, direct=direct)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_few_interim_heads_precede_an_answer(*, direct: bool) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    async with engine_saying(CONTINUE, hints * 7, OK) as url, open_session() as session:
        assert await posted(session, url, direct=direct) == b"ok"


FIELDS = b"".join(b"x-%d: %b\r\n" % (n, b"a" * 60_000) for n in range(3))
LARGE = {
    "a head": b"HTTP/1.1 200 OK\r\n" + FIELDS + b"content-length: 2\r\n\r\nok",
    "a head that does not end": b"HTTP/1.1 200 OK\r\n" + FIELDS,
    "trailers that do not end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + FIELDS * 2,
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", LARGE)
async def test_what_is_large_beside_a_body_is_not_held(name: str, *, direct: bool) -> None:
    async with engine_saying(LARGE[name], stays=True) as url, open_session() as session, asyncio.timeout(5):
        with pytest.raises(aiohttp.ClientPayloadError):
            await posted(session, url, direct=direct)


async def test_many_answers_on_one_connection_are_no_large_head() -> None:
    connections = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nx: %b\r\ncontent-length: 2\r\n\r\nok" % (b"a" * 2000))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with open_session() as session:
        for _ in range(100):
            async with session.get(url) as answer:
                assert await answer.read() == b"ok"
    server.close()

    assert len(connections) == 1
