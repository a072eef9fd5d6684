"""`/health`, `/ready` and `/metrics` of every process, and the HTTP server that carries them.

Health says that the process runs; readiness says that it can do its work, and if not, what is missing.
"""

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import click
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from typing_extensions import override

from pointsman.chassis.http_protocol import HttpLimits, http_protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept, as nginx does: longer than balancers and clients keep theirs (mostly 60), so that
it is never the server that closes while a request is on its way."""

HEALTH_CONNECTIONS_MAX = 256


class HealthBoard:
    """What this process still needs before it is ready. Starts ready; parts say what they wait for."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}

    def missing(self, part: str, reason: str) -> None:
        self._missing[part] = reason

    def restored(self, part: str) -> None:
        self._missing.pop(part, None)

    @property
    def ready(self) -> bool:
        return not self._missing

    @property
    def lacks(self) -> dict[str, str]:
        """What is missing, part by part, with the reason."""
        return dict(self._missing)

    def answer(self, path: str) -> tuple[int, str, bytes] | None:
        """Status, content type and body for a health path, or None for any other path."""
        if path == "/health":
            return 200, "application/json", b'{"status":"ok"}'
        if path == "/ready":
            body = json.dumps({"ready": self.ready, "missing": self.lacks}).encode()
            return (200 if self.ready else 503), "application/json", body
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(REGISTRY)
        return None


def health_app(board: HealthBoard) -> AsgiApp:
    """A plain ASGI application that serves nothing but the health paths."""

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = board.answer(scope["path"]) or (404, "text/plain", b"not found\n")
        await send_whole(send, status, body, content_type)

    return app


async def send_whole(
    send: Send, status: int, body: bytes, content_type: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a complete ASGI response."""
    fixed = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})


class HttpServer(uvicorn.Server):
    """uvicorn inside a process that owns its own signals."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        shutdown_seconds: int = 2,
        keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
        limits: HttpLimits | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http_protocol(limits or HttpLimits()),
                ws="none",
                timeout_keep_alive=keep_alive_seconds,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=shutdown_seconds,
            )
        )

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def bound_port(self) -> int:
        """The port that was taken, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as ended:  # uvicorn's own way to say so, which would leave our other tasks where they are
            reason = ended.__context__
            msg = f"cannot listen on {self.config.host}:{self.config.port} ({reason}); choose another with --host and --port"
            raise click.ClickException(msg) from reason

    async def serve_until_cancelled(self) -> None:
        """Serve; when cancelled, finish what is under way within the shutdown bound. Raises click.ClickException where
        the port is taken."""
        await self.serve()


def health_server(board: HealthBoard, host: str, port: int) -> HttpServer:
    """A server of the health paths alone, for services without an HTTP interface of their own."""
    limits = HttpLimits(connections=HEALTH_CONNECTIONS_MAX)
    return HttpServer(health_app(board), host=host, port=port, limits=limits)
