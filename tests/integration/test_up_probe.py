"""What `up` makes of servers that answer in their own way, or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pointsman_cli.up.probe import NoAnswerError, http_get


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
