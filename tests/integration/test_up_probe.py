"""What `up` makes of servers that answer in their own way, or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click
import pytest

from pointsman_cli.up.probe import NoAnswerError, http_get, model_of


@asynccontextmanager
async def saying(*pieces: bytes, closes: bool) -> AsyncIterator[str]:
    """The URL of a server that says this to everybody."""
    held = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if not closes:
                await held.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        held.set()
        server.close()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_is_over_when_its_length_is_there_though_the_connection_stays(version: bytes) -> None:
    answer = b"HTTP/" + version + b" 503 Busy\r\nconnection: keep-alive\r\ncontent-length: 4\r\n\r\nwait"
    async with saying(answer, closes=False) as url:
        assert await http_get(url, timeout=10.0) == (503, b"wait")


async def test_an_answer_without_a_length_is_over_with_the_connection() -> None:
    async with saying(b"HTTP/1.0 200 OK\r\n\r\n", b"all ", b"of it", closes=True) as url:
        assert await http_get(url, timeout=10.0) == (200, b"all of it")


@pytest.mark.parametrize(
    ("said", "closes"),
    [(b"", False), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", False), (b"220 mail\r\n", True), (b"", True)],
)
async def test_no_answer_is_told_in_time(said: bytes, closes: bool) -> None:
    async with saying(said, closes=closes) as url:
        async with asyncio.timeout(10):
            with pytest.raises(NoAnswerError):
                await http_get(url, timeout=0.3)


async def test_nobody_there_is_told() -> None:
    async with saying(closes=True) as url:
        pass

    with pytest.raises(NoAnswerError, match="refused"):
        await http_get(url, timeout=5.0)


async def test_an_engine_with_a_key_is_asked_with_it_and_without_says_how_to_give_it() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        known = b"bearer sk-1\r\n" in asked[-1].lower()
        body = b'{"data": [{"id": "m"}]}' if known else b""
        status = b"200 OK" if known else b"401 Unauthorized"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await model_of(url, "sk-1") == "m"
        with pytest.raises(click.ClickException, match="401; give its key with POINTSMAN_ENGINE_API_KEY"):
            await model_of(url, "")

    assert b"authorization" not in asked[-1].lower()
