"""Posts to engines over aiohttp's connections and parser, past the rest of its client: cookies, redirects, proxies,
retries and timers of a request, of which no engine has any, cost as much as everything else that the ingress does with
a connection. In: a URL, headers, a small body. Out: an answer with the members of aiohttp's that are used here."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import aiohttp
from aiohttp.client_reqrep import ClientRequest
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDictProxy
from yarl import URL

URLS_MAX = 10_000
FIELD_BYTES_MAX = 64 * 1024  # of one header; vLLM tells of some 500 embeddings in one
AUTOMATIC = ("accept-encoding", "user-agent", "content-type")
"""Headers that are not sent by themselves."""


class Answer(Protocol):
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content(self) -> aiohttp.StreamReader: ...
    @property
    def connection(self) -> Any: ...
    def close(self) -> None: ...
    def release(self) -> Any: ...


class DirectSession:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        connector = session.connector
        assert connector is not None, "the session is open"
        self._connector = connector
        self._timeout = session.timeout
        self._destination = lru_cache(URLS_MAX)(_Destination)

    async def post(self, url: URL, data: bytes, headers: Mapping[str, str]) -> Answer:
        """Raises aiohttp.ClientError, OSError, TimeoutError and ValueError, as aiohttp does."""
        destination = self._destination(url)
        head = destination.head(headers, len(data))
        try:
            connection = await self._connector.connect(destination.request, [], self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url.host}") from error
        try:
            return await _exchanged(connection, head + data)
        except HttpProcessingError as error:
            connection.close()
            raise aiohttp.ClientPayloadError(f"{error.code}, {error.message}") from error
        except BaseException:
            connection.close()
            raise


async def _exchanged(connection: aiohttp.connector.Connection, sent: bytes) -> "_DirectAnswer":
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or transport is None or transport.is_closing():
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
    protocol.set_response_params(read_until_eof=True, auto_decompress=False, max_field_size=FIELD_BYTES_MAX)
    transport.write(sent)
    message, content = await protocol.read()
    return _DirectAnswer(message.code, message.headers, content, connection)


class _Destination:
    """What is the same for all requests to a URL. Raises ValueError for an invalid one."""

    def __init__(self, url: URL) -> None:
        if url.scheme not in ("http", "https") or not url.raw_host:
            invalid = f"{url} is no URL of an engine"
            raise aiohttp.InvalidURL(url, invalid)
        self.request = ClientRequest("POST", url, skip_auto_headers=AUTOMATIC)
        """For the connector, which asks where to connect."""
        own = {name: value for name, value in self.request.headers.items() if name.lower() != "content-length"}
        self._signs_in = any(name.lower() == "authorization" for name in own)
        lines = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._first = f"POST {self.request.url.raw_path_qs} HTTP/1.1\r\n{lines}".encode()

    def head(self, headers: Mapping[str, str], length: int) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
            raise ValueError("a header has a line end")
        if self._signs_in and any(name.lower() == "authorization" for name in headers):
            raise ValueError("both the URL and a header have credentials")
        return b"%b%bcontent-length: %d\r\n\r\n" % (self._first, lines.encode(), length)


class _DirectAnswer:
    def __init__(
        self,
        status: int,
        headers: "CIMultiDictProxy[str]",
        content: aiohttp.StreamReader,
        connection: aiohttp.connector.Connection,
    ) -> None:
        self.status = status
        self.headers = headers
        self.content = content
        self.connection: aiohttp.connector.Connection | None = connection
        content.on_eof(self.release)

    def release(self) -> None:
        """The connection serves another request if the answer has ended."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
