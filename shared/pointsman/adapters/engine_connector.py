"""Connections to engines over HTTP, for ingresses and workers, and to an OIDC issuer. aiohttp's own skip any number of
heads of status 1xx, and meanwhile hold up the event loop; and they bound each header and the number of headers, not all
headers together."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import aiohttp
from aiohttp import ClientRequest, ClientTimeout
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.tracing import Trace
from typing_extensions import override

INTERIM_HEADS_MAX = 8
HEAD_BYTES_MAX = 128 * 1024
"""Of a head, or of trailers; vLLM tells of some 500 embeddings in a header of 64 KiB."""
SWITCHING_PROTOCOLS = 101
STALL_SECONDS = 0.25
"""A timer this late means that the process stalled."""
STALLED_MAX = 8


class EngineConnector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        protocol: Callable[..., ResponseHandler] = _EngineProtocol
        self._factory = partial(protocol, loop=self._loop)

    @override
    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        """Raises TimeoutError; where this process stood still meanwhile, only after STALLED_MAX further attempts: its timers
        are due before it looks whether the engine has answered."""
        for _ in range(STALLED_MAX):
            began = self._loop.time()
            try:
                return await super().connect(req, traces, timeout)
            except TimeoutError:
                if self._loop.time() - began < (timeout.sock_connect or inf) + STALL_SECONDS:
                    raise
        return await super().connect(req, traces, timeout)


class _EngineProtocol(ResponseHandler):
    _framing_bytes = 0
    """Received since the last head or the last bytes of a body."""
    _body_bytes = 0

    @override
    def data_received(self, data: bytes) -> None:
        before = self._payload, self._body_bytes
        super().data_received(data)
        self._body_bytes = 0 if self._payload is None else self._payload.total_bytes
        self._framing_bytes = self._framing_bytes + len(data) if (self._payload, self._body_bytes) == before else 0
        if self._framing_bytes > HEAD_BYTES_MAX and self.transport is not None:
            self.set_exception(_too_large())
            self.transport.close()

    @override
    async def read(self) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Raises aiohttp.ClientPayloadError."""
        for _ in range(INTERIM_HEADS_MAX + 1):
            message, content = await super().read()
            if sum(len(name) + len(value) for name, value in message.raw_headers) > HEAD_BYTES_MAX:
                raise _too_large()
            if message.code >= 200 or message.code == SWITCHING_PROTOCOLS:
                return message, content
        raise aiohttp.ClientPayloadError(f"more than {INTERIM_HEADS_MAX} heads of status 1xx came before the answer")


def _too_large() -> aiohttp.ClientPayloadError:
    too_large = f"a head or trailers are larger than {HEAD_BYTES_MAX} bytes"
    return aiohttp.ClientPayloadError(too_large)
