"""HTTP without sockets: an ASGI application in one process, its client in another, and failures between. `Exchange` has
the methods of aiohttp's response that the ingress uses."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from random import Random
from types import TracebackType
from typing import Any, Protocol, Self

from yarl import URL

from pointsman.primitives import EngineSeconds
from pointsman.runtime.health import AsgiApp, Scope
from pointsman_lab.torture.loop import MOMENT_SECONDS, VirtualLoop

HOP_SECONDS = 0.0003
CONNECT_SECONDS_MAX = 2.0

Message = MutableMapping[str, Any]


class Site(Protocol):
    app: AsgiApp | None

    @property
    def reachable(self) -> bool: ...

    def attend(self, exchange: "Exchange", work: Callable[[], Awaitable[None]]) -> None: ...


class Exchange:
    """`status` and `headers` are set once `answered`."""

    def __init__(self, site: Site, loop: VirtualLoop, chance: Random, scope: Scope, body: bytes) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = self
        """As in aiohttp, where the body is an object of its own."""
        self.connection = None
        self.pieces: list[bytes] = []
        self.messages: list[str] = []
        self._site = site
        self._loop = loop
        self._chance = chance
        self._scope = scope
        self._body: bytes | None = body
        self._arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._last_at: EngineSeconds = 0.0
        self._broken = ""
        self.over = False

    def begin(self, app: AsgiApp) -> None:
        self._site.attend(self, lambda: app(self._scope, self._receive, self._send))

    async def answered(self) -> Self:
        """Waits for the head. Raises ConnectionResetError."""
        message = await self._next()
        if message is None or message["type"] != "http.response.start":
            raise ConnectionResetError("the connection was closed before an answer came")
        self.status = message["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        return self

    def is_eof(self) -> bool:
        return self.over

    async def readany(self) -> bytes:
        """The next piece; empty at the end. Raises ConnectionResetError."""
        while not self.over:
            message = await self._next()
            if message is None:
                raise ConnectionResetError("the connection was closed in the middle of an answer")
            self.over = not message.get("more_body", False)
            if piece := bytes(message.get("body", b"")):
                self.pieces.append(piece)
                return piece
        return b""

    async def read(self) -> bytes:
        while await self.readany():
            pass
        return b"".join(self.pieces)

    def close(self) -> None:
        self._gone.set()

    def release(self) -> None:
        self._gone.set()

    def break_off(self, reason: str) -> None:
        self._broken = reason
        self._arrived.put_nowait(None)

    def end(self) -> None:
        self._loop.outside(max(0.0, self._last_at + MOMENT_SECONDS - self._loop.time()), self._arrived.put_nowait, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> Message | None:
        if self._broken and self._arrived.empty():
            return None
        return await self._arrived.get()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.messages.append(message["type"] if message.get("more_body", True) else "end")
        now = self._loop.time()
        self._last_at = max(self._last_at + MOMENT_SECONDS, now + self._chance.expovariate(1 / HOP_SECONDS))
        self._loop.outside(self._last_at - now, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        if not self._broken and self._site.reachable:
            self._arrived.put_nowait(message)


class PendingResponse:
    def __init__(self, exchange: Callable[[], Awaitable[Exchange]]) -> None:
        self._exchange = exchange
        self._open: Exchange | None = None

    def __await__(self) -> Generator[Any, None, Exchange]:
        return self._exchange().__await__()

    async def __aenter__(self) -> Exchange:
        self._open = await self._exchange()
        return self._open

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()


class Session:
    def __init__(
        self,
        sites: dict[str, Site],
        loop: VirtualLoop,
        chance: Random,
        *,
        can_reach: Callable[[str], bool],
        sends: Callable[[str, dict[str, str]], None] = lambda _host, _headers: None,
        connects: Callable[[str, dict[str, str]], None] = lambda _host, _headers: None,
    ) -> None:
        """`sites` by host. `can_reach`: whether a host is reachable from here. `sends`: called with host and headers of
        each request; `connects`: of each that reaches its host."""
        self._sites = sites
        self._loop = loop
        self._chance = chance
        self._can_reach = can_reach
        self._sends = sends
        self._connects = connects

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def post(
        self,
        url: URL | str,
        *,
        data: Any,
        headers: dict[str, str] | None = None,
        allow_redirects: bool = False,
        trace_request_ctx: object = None,
    ) -> PendingResponse:
        del allow_redirects, trace_request_ctx
        headers = headers or {}
        self._sends(str(URL(url).host), headers)
        body = data if isinstance(data, bytes) else data.read()
        return PendingResponse(lambda: self._post(URL(url), body, headers))

    async def _post(self, url: URL, body: bytes, headers: dict[str, str]) -> Exchange:
        host = str(url.host)
        site = self._sites[host]
        await asyncio.sleep(self._chance.expovariate(1 / HOP_SECONDS))
        if not self._can_reach(host) or not site.reachable:
            await asyncio.sleep(CONNECT_SECONDS_MAX)
            raise TimeoutError(f"no answer from {host}")
        if site.app is None:
            raise ConnectionRefusedError(f"nothing listens on {host}")
        self._connects(host, headers)
        exchange = Exchange(site, self._loop, self._chance, post_scope(url.path, headers), body)
        exchange.begin(site.app)
        return await self._patiently(exchange)

    async def _patiently(self, exchange: Exchange) -> Exchange:
        try:
            return await exchange.answered()
        except asyncio.CancelledError:
            exchange.close()
            raise


def post_scope(path: str, headers: dict[str, str]) -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
