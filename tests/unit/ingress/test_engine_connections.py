"""Connections to engines notice that a host is gone, which closes nothing."""

import asyncio
import socket

from aiohttp import web
from aiohttp.test_utils import TestServer

from pointsman_ingress.engine.client import open_session


async def test_an_engine_whose_host_is_gone_is_noticed_by_keep_alive_within_eleven_seconds() -> None:
    looked = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        await looked.wait()
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, open_session() as session, session.get(server.make_url("/")) as response:
        await response.content.readany()
        assert response.connection is not None
        assert response.connection.transport is not None
        connection = response.connection.transport.get_extra_info("socket")
        probes = [
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]

        looked.set()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 15_000
        assert probes[0] + probes[1] * probes[2] <= 11
