"""A minimal HTTP/1.1 client over keep-alive connections, and its requests."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import click

TOKEN_IDS_BYTES = 40_000
TOKEN_IDS = range(10_000, 30_000)
REQUEST_SECONDS_MAX = 60.0
GENEROUS_SLO_MS = 10_000_000


class BenchError(click.ClickException):
    """The measurement cannot be made; the message says why and what to do."""


class RefusedError(BenchError):
    """A status of 4xx."""


@dataclass(frozen=True)
class Target:
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Target":
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.hostname is None:
            raise BenchError(f"{url!r} is no URL")
        return cls(parts.hostname, parts.port or 80)


@dataclass(frozen=True)
class Ask:
    name: str
    path: str
    body: bytes

    def to(self, target: Target) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self.body)}\r\nx-slo-ttft-ms: {GENEROUS_SLO_MS}\r\n\r\n"
        )
        return head.encode() + self.body


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        for line in self.head.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode()
        return ""


class Connection:
    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer

    async def ask(self, ask: Ask) -> Answer:
        """Raises BenchError unless the status is 200."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                self._writer.write(ask.to(self._target))
                answer = await self._answer()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise BenchError(
                f"{self._target.host}:{self._target.port} did not answer: {str(error) or type(error).__name__}"
            ) from error
        if answer.status != 200:
            message = f"{ask.path} answered {answer.status}: {answer.body[:300].decode(errors='replace')}"
            raise RefusedError(message) if 400 <= answer.status < 500 else BenchError(message)
        return answer

    async def _answer(self) -> Answer:
        head = await self._reader.readuntil(b"\r\n\r\n")
        answer = Answer(int(head[9:12]), head, b"")
        length = answer.header("content-length")
        body = await self._reader.readexactly(int(length)) if length else await self._chunks()
        return Answer(answer.status, head, body)

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(parts)


@asynccontextmanager
async def connection(target: Target) -> AsyncIterator[Connection]:
    """Raises BenchError when the connection is refused."""
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=4 * 1024 * 1024)
    except OSError as error:
        raise BenchError(f"nothing answers at {target.host}:{target.port}: {error.strerror or error}") from error
    try:
        yield Connection(target, reader, writer)
    finally:
        writer.close()


def small_chat(model: str) -> Ask:
    body = {"model": model, "messages": [{"role": "user", "content": "Say one word."}], "max_tokens": 1}
    return Ask("small", "/v1/chat/completions", json.dumps(body).encode())


def token_ids(model: str) -> Ask:
    tokens = random.Random(40).choices(TOKEN_IDS, k=TOKEN_IDS_BYTES // 7)
    body = {"model": model, "prompt": tokens, "max_tokens": 1}
    return Ask("token_ids_40kb", "/v1/completions", json.dumps(body).encode())


def stream(model: str, tokens: int) -> Ask:
    messages = [{"role": "user", "content": "Say many words."}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return Ask(f"stream_{tokens}", "/v1/chat/completions", json.dumps(body).encode())
