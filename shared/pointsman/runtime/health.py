"""Probes and metrics of every process. `/livez`: 200 while the event loop runs. `/readyz`: 503 while a part is
*missing*; *degraded* parts keep it ready; `?verbose` as in kube-apiserver. `/health` as in vLLM."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

import click
import structlog
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from typing_extensions import override

from pointsman.adapters.waiting import wait_at_most
from pointsman.primitives import Seconds, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.http_protocol import HttpLimits, RefusalBody, http_protocol, openai_refusal
from pointsman.runtime.metrics_page import SharedMetricsPage
from pointsman.runtime.tls_server import TlsServer, listening

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_SECONDS = 75
"""Above most clients' (60 s), so that the server does not close first; nginx's default."""
HEALTH_CONNECTIONS_MAX = 256
CUT_SECONDS: Seconds = 0.5
TICK_SECONDS = WallSeconds(0.1)
"""Until it is noticed that another thread set `should_exit`."""
SHUTDOWN_POLL_SECONDS: Seconds = 0.05
SHUTDOWN_PART = "shutdown"
VERBOSE = "verbose"
Document = Callable[[], bytes | None]
"""JSON, or None while there is none."""
NO_DOCUMENTS: Mapping[str, Document] = MappingProxyType({})
NO_APPS: Mapping[str, AsgiApp] = MappingProxyType({})


class HealthBoard:
    def __init__(self, *, pool: str = "", of: str = "") -> None:
        """`pool`: in metrics. `of`: in the names of parts, if the process has several boards."""
        self.pool = pool
        self._of = of
        self._missing: dict[str, str] = {}
        self._degraded: dict[str, str] = {}
        self._parts: dict[str, None] = {}
        self._metrics = SharedMetricsPage()

    def missing(self, part: str, reason: str) -> None:
        self._degraded.pop(self._named(part), None)
        self._note(self._missing, part, reason)

    def degraded(self, part: str, reason: str) -> None:
        self._missing.pop(self._named(part), None)
        self._note(self._degraded, part, reason)

    def restored(self, part: str) -> None:
        name = self._named(part)
        telemetry.DEGRADED.labels(self.pool, name).set(0)
        self._missing.pop(name, None)
        self._degraded.pop(name, None)

    def forget(self, part: str) -> None:
        """The part is no more."""
        name = self._named(part)
        for known in (self._missing, self._degraded, self._parts):
            known.pop(name, None)
        telemetry.DEGRADED.remove(self.pool, name)

    @property
    def ready(self) -> bool:
        return not self._missing

    @property
    def whole(self) -> bool:
        return not self.lacks

    @property
    def lacks(self) -> dict[str, str]:
        return self.missing_parts | self.degraded_parts

    @property
    def missing_parts(self) -> dict[str, str]:
        return dict(self._missing)

    @property
    def degraded_parts(self) -> dict[str, str]:
        return dict(self._degraded)

    @property
    def parts(self) -> list[str]:
        return list(self._parts)

    async def answer(self, path: str, query: str = "") -> tuple[int, str, bytes] | None:
        """Returns status, content type and body, or None for other paths."""
        if path == "/livez":
            return 200, "text/plain; charset=utf-8", b"ok"
        if path == "/health":
            return 200, "application/json", b'{"status":"ok"}'
        if path == "/readyz" and VERBOSE in parse_qs(query, keep_blank_values=True):
            return self._status, "text/plain; charset=utf-8", self._verbose().encode()
        if path == "/readyz":
            status = {"ready": self.ready, "missing": self.missing_parts, "degraded": self.degraded_parts}
            return self._status, "application/json", json.dumps(status).encode()
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, await self._metrics.current()
        return None

    @property
    def _status(self) -> int:
        return 200 if self.ready else 503

    def _verbose(self) -> str:
        missing, degraded = self.missing_parts, self.degraded_parts
        lines = [f"[+]{part} ok" for part in self.parts if part not in missing and part not in degraded]
        lines += [f"[-]{part} degraded: {reason}" for part, reason in degraded.items()]
        lines += [f"[-]{part} failed: {reason}" for part, reason in missing.items()]
        return "\n".join([*lines, f"readyz check {'passed' if self.ready else 'failed'}", ""])

    def _note(self, lacking: dict[str, str], part: str, reason: str) -> None:
        name = self._named(part)
        lacking[name] = reason
        self._parts.setdefault(name)
        telemetry.DEGRADED.labels(self.pool, name).set(1)

    def _named(self, part: str) -> str:
        return f"{part} of {self._of}" if self._of else part


def health_app(
    board: HealthBoard,
    documents: Mapping[str, Document] = NO_DOCUMENTS,
    apps: Mapping[str, AsgiApp] = NO_APPS,
) -> AsgiApp:
    """`documents`: further pages by path; 503 while there is none. `apps`: what else is served, by path."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in apps:
            await apps[path](scope, receive, send)
            return
        if path in documents:
            document = documents[path]()
            await send_whole(send, 503 if document is None else 200, document or b"{}", "application/json")
            return
        status, content_type, body = await board.answer(path, query_of(scope)) or (404, "text/plain", b"not found\n")
        await send_whole(send, status, body, content_type)

    return app


def query_of(scope: Scope) -> str:
    return str(scope.get("query_string", b"").decode("latin-1"))


async def send_whole(
    send: Send, status: int, body: bytes, content_type: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    fixed = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})


class HttpServer(uvicorn.Server):
    """uvicorn without signal handling. Once `should_exit` is set: lame duck (`connection: close` on answers), drain (no
    new connections), cut (tasks are cancelled within CUT_SECONDS; `hurry` skips to it)."""

    def __init__(
        self,
        app: Any,
        *,
        host: str,
        port: int,
        listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        options: str = "--host and --port",
        keep_alive_seconds: int = KEEP_ALIVE_SECONDS,
        limits: HttpLimits | None = None,
        lame_duck_seconds: Seconds = 0.0,
        shutdown_seconds: Seconds = 2.0,
        on_lame_duck: Callable[[], None] = lambda: None,
        refusal_body: RefusalBody = openai_refusal,
    ) -> None:
        """`listener`: a bound socket instead of `host` and `port`; `options`: those that choose them.
        `shutdown_seconds`: drain bound, wall seconds."""
        self._exit = asyncio.Event()
        self._limits = limits or HttpLimits()
        super().__init__(
            uvicorn.Config(
                app,
                http=http_protocol(self._limits, refusal_body),
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
            )
        )
        self.lame_duck_seconds = lame_duck_seconds
        self._drain_seconds_max = shutdown_seconds
        self._on_lame_duck = on_lame_duck
        self._listener = listener
        self._tls = tls
        self._options = options
        self._hurried = asyncio.Event()

    def hurry(self) -> None:
        self._hurried.set()

    @property  # type: ignore[explicit-override]  # mypy does not see it on a settable property
    @override
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def bound_port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own ends the process if the port is taken, and has no bounds for TLS."""
        config = self.config
        create = partial(config.http_protocol_class, config=config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]
        where: dict[str, Any] = (
            {"host": config.host, "port": config.port} if self._listener is None else {"sock": self._listener}
        )
        loop = asyncio.get_running_loop()
        server: Any
        try:
            if self._tls is None:
                server = await loop.create_server(create, **where, backlog=config.backlog)
            else:
                sockets = listening(config.backlog, **where)
                server = TlsServer(sockets, create, self._tls, shutdown_seconds=self._limits.send_seconds)
        except (OSError, UnicodeError) as error:
            raise click.ClickException(
                f"cannot listen on {config.host}:{config.port} ({error}); choose another with {self._options}"
            ) from error
        self.servers = [server]
        self.started = True

    @override
    async def main_loop(self) -> None:
        """Ends at once when told, unlike uvicorn's. No date or server header to renew."""
        while not self.should_exit:
            await wait_at_most(self._exit, TICK_SECONDS)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_lame_duck()
        self.server_state.default_headers.append((b"connection", b"close"))
        await self._within(self.lame_duck_seconds, lambda: False)
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._within(self._drain_seconds_max, self._is_idle):
            await self._cut()

    async def _cut(self) -> None:
        left = list(self.server_state.tasks)
        log.warning("requests_cut", count=len(left))
        for task in left:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_SECONDS):
                while not self._is_idle():  # noqa: ASYNC110 - uvicorn has no event for the end of a connection
                    await asyncio.sleep(SHUTDOWN_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _is_idle(self) -> bool:
        return not (self.server_state.connections or self.server_state.tasks)

    async def _within(self, seconds: Seconds, done: Callable[[], bool]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not done():
            wait = min(SHUTDOWN_POLL_SECONDS, deadline - loop.time())
            if wait <= 0 or self._hurried.is_set():
                return False
            await wait_at_most(self._hurried, WallSeconds(wait))
        return True


def health_server(
    board: HealthBoard,
    host: str,
    port: int,
    *,
    listener: socket.socket | None = None,
    options: str = "--host and --port",
    documents: Mapping[str, Document] = NO_DOCUMENTS,
    apps: Mapping[str, AsgiApp] = NO_APPS,
) -> HttpServer:
    telemetry.show_process()
    limits = HttpLimits(connections=HEALTH_CONNECTIONS_MAX)
    app = health_app(board, documents, apps)
    return HttpServer(app, host=host, port=port, listener=listener, options=options, limits=limits)
