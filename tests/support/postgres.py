"""A PostgreSQL server of its own: this machine's programs, or those of the Debian package. And a way to it on which it
vanishes: no connection is closed, no byte arrives."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from pointsman.adapters.tcp_ports import free_ports
from tests.support.debian_programs import unpacked

START_SECONDS_MAX = 60
ROOT_BECOMES = "nobody"
"""The server refuses to run as root."""


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """URL of an empty database, for asyncpg. Skips where there is no PostgreSQL."""
    programs, environment = _programs()
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    user = ROOT_BECOMES if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(directory, user)
    data = directory / "data"

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), "-D", str(data), *arguments]
        subprocess.run(
            command,
            check=True,
            user=user,
            cwd=directory,
            env=environment,
            capture_output=True,
            timeout=START_SECONDS_MAX,
        )

    try:
        run("initdb", "--auth=trust", "--username=test", "--no-sync", "--encoding=UTF8")
        (port,) = free_ports(1)  # so late that nobody else takes it meanwhile
        options = f"-h 127.0.0.1 -p {port} -k {directory} -c fsync=off -c shared_buffers=16MB"
        run("pg_ctl", "-w", "-l", str(directory / "log"), "-o", options, "start")
        try:
            yield f"postgresql+asyncpg://test@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def way_to(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Another URL of the server, and whether it can be reached there."""
    reachable = asyncio.Event()
    reachable.set()
    target = make_url(url)
    running: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(65536):
                await reachable.wait()
                writer.write(data)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reachable.wait()
        there = await asyncio.open_connection(target.host, target.port)
        for ends in ((reader, there[1]), (there[0], writer)):
            running.add(asyncio.create_task(pass_on(*ends)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield str(target.set(port=server.sockets[0].getsockname()[1])), reachable
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _programs() -> tuple[Path, dict[str, str]]:
    here = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if here:
        return here[-1].parent, dict(os.environ)
    root = unpacked("postgresql-15", "bookworm", libraries=())
    found = sorted(root.glob("usr/lib/postgresql/*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL here")
    libraries = ":".join(str(path) for path in root.glob("usr/lib/*-linux-gnu"))
    return found[-1].parent, os.environ | {"LD_LIBRARY_PATH": libraries}
