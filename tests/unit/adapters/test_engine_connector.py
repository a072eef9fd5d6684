"""Connections to engines: whose fault a late one is."""

import asyncio
import socket
import time

import aiohttp
import pytest
import uvloop
from aiohttp import ClientRequest
from yarl import URL

from pointsman.adapters.engine_connector import EngineConnector

CONNECT_SECONDS = 0.1
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)


async def connected(port: int, *, stalls: int = 0) -> None:
    """Raises TimeoutError. The process stands still `stalls` times, each time longer than a connection may take."""
    loop = asyncio.get_running_loop()
    async with EngineConnector() as connector:
        request = ClientRequest("POST", URL(f"http://127.0.0.1:{port}/"), loop=loop)
        connecting = asyncio.ensure_future(connector.connect(request, [], TIMEOUT))
        for _ in range(stalls):
            await asyncio.sleep(0)
            time.sleep(4 * CONNECT_SECONDS)  # noqa: ASYNC251 - what is tested
        (await connecting).close()


async def connected_to_a_server(stalls: int) -> None:
    async with await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0) as server:
        await connected(server.sockets[0].getsockname()[1], stalls=stalls)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("stalls", [0, 1, 3])
def test_an_engine_is_not_away_because_this_process_stood_still(new_loop: object, stalls: int) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        runner.run(connected_to_a_server(stalls))


async def test_an_engine_that_accepts_no_connection_is_given_up() -> None:
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for other in (first, second):  # they fill its backlog
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        with pytest.raises(TimeoutError):
            await connected(deaf.getsockname()[1])
