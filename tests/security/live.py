"""A fleet that runs, seen from outside: its processes' memory and files, what it has written, and what a client may ask."""

import asyncio
import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pointsman_cli.discovery import FleetFile
from tests.support.up import POINTSMAN

PATIENCE_SECONDS = 30.0
SILENCE_SECONDS = 0.7
"""After which an answer that may never come is no longer waited for."""


@dataclass(frozen=True, slots=True)
class Usage:
    rss_bytes: int
    files: int


def usage_of(pid: int) -> Usage:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(pages * 4096, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


def usage(fleet: FleetFile, *roles: str) -> dict[str, Usage]:
    return {process.name: usage_of(process.pid) for role in roles for process in fleet.of_role(role)}


def secrets_of(fleet: FleetFile, data: Path) -> tuple[bytes, ...]:
    """What no client may be told: the secret, credentials, where the data is, addresses of engines and NATS."""
    texts = {str(data), fleet.nats, fleet.nats.partition("://")[2].rpartition("@")[2]}
    texts |= {
        process.url.partition("://")[2] for process in fleet.processes if process.role != "ingress" and process.url
    }
    texts |= {text for path in data.glob("credentials/**/*") if path.is_file() for text in _seeds(path)}
    texts.add(Path(fleet.secret_file).read_text().strip())
    return tuple(text.encode() for text in sorted(texts) if text)


def _seeds(path: Path) -> Iterator[str]:
    yield from (line for line in path.read_text().split() if line.startswith("S") and len(line) > 40)


def key_for(tenant: str, data: Path) -> str:
    """A new key, made as an operator makes one."""
    command = [POINTSMAN, "keys", "create", tenant, "--json", "--from", str(data)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return str(json.loads(made.stdout)["key"])


def files_with(text: bytes, directory: Path, *, patterns: Iterable[str] = ("**/*",)) -> list[str]:
    """Names of the files below a directory that hold these bytes."""
    found = [path for pattern in patterns for path in directory.glob(pattern) if path.is_file()]
    return [str(path.relative_to(directory)) for path in found if text in path.read_bytes()]


async def conversation(port: int, raw: bytes, *, complete: bool = True, read_bytes_max: int | None = None) -> bytes:
    """Send bytes, and read until the server closes; less, if the client hangs up or no answer is owed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        writer.write(raw)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await writer.drain()
            while read_bytes_max is None or len(heard) < read_bytes_max:
                async with asyncio.timeout(PATIENCE_SECONDS if complete else SILENCE_SECONDS):
                    piece = await reader.read(65536)
                if not piece:
                    break
                heard += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return heard


async def public_document(url: str) -> dict[str, object]:
    """The OpenAPI document at this URL."""
    host, _, rest = url.partition("://")[2].partition("/")
    raw = f"GET /{rest} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    answer = await conversation(int(host.rpartition(":")[2]), raw)
    document: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return document
