"""Connections to engines over HTTP, for ingresses and workers: they skip a few heads of status 1xx before an answer, where
aiohttp's own skip any number and meanwhile leave the event loop to nobody."""

from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from typing_extensions import override

INTERIM_HEADS_MAX = 8
SWITCHING_PROTOCOLS = 101


class EngineConnector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        protocol: Callable[..., ResponseHandler] = _EngineProtocol
        self._factory = partial(protocol, loop=self._loop)


class _EngineProtocol(ResponseHandler):
    @override
    async def read(self) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Raises aiohttp.ClientPayloadError."""
        for _ in range(INTERIM_HEADS_MAX + 1):
            message, content = await super().read()
            if message.code >= 200 or message.code == SWITCHING_PROTOCOLS:
                return message, content
        endless = f"more than {INTERIM_HEADS_MAX} heads of status 1xx came before the answer"
        raise aiohttp.ClientPayloadError(endless)
