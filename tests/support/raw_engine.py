"""An engine that sends what a test says, byte by byte: also what is no HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

HEAD = b"HTTP/1.1 200 OK\r\n"
STREAM_HEAD = HEAD + b"content-type: text/event-stream\r\nconnection: close\r\n\r\n"


def whole(body: bytes, *, head: bytes = HEAD, content_type: bytes = b"application/json") -> bytes:
    """An answer with its length."""
    return (
        head + b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (content_type, len(body)) + body
    )


class RawEngine:
    """`answers`: the pieces of an answer by path; of other paths the pieces of `otherwise`. Each piece is sent by itself."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, Sequence[bytes]] = {}
        self.otherwise: Sequence[bytes] = [whole(b'{"detail": "Not Found"}', head=b"HTTP/1.1 404 Not Found\r\n")]
        self.pause_seconds = 0.0
        """Between pieces."""
        self.goes_on: asyncio.Event | None = None
        """Sends no second piece before this is set."""
        self.asked: list[str] = []
        self.posted: list[str] = []
        """Paths to which there was a POST."""
        self.sent_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one answer."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            self.asked.append(path)
            lengths = [
                line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
            ]
            await reader.readexactly(sum(map(int, lengths)))  # who closes before resets the connection, answer and all
            if head.startswith(b"POST"):
                self.posted.append(path)
            pieces = self.answers.get(path, self.otherwise)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                self.sent_bytes += len(piece)
                await asyncio.sleep(self.pause_seconds)
                if self.goes_on is not None:
                    await self.goes_on.wait()


@asynccontextmanager
async def running_raw_engine() -> AsyncIterator[RawEngine]:
    """On a free port of the loopback."""
    engine = RawEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 24)
    host, port = server.sockets[0].getsockname()[:2]
    engine.url = f"http://{host}:{port}"
    try:
        yield engine
    finally:
        server.close()
