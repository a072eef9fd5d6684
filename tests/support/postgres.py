"""A PostgreSQL server of its own: this machine's programs, or those of the Debian package."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        run("initdb", "--auth=trust", "--username=test", "--no-sync", "--encoding=UTF8")
        options = f"-h 127.0.0.1 -p {port} -k {directory} -c fsync=off -c shared_buffers=16MB"
        run("pg_ctl", "-w", "-l", str(directory / "log"), "-o", options, "start")
        try:
            yield f"postgresql+asyncpg://test@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
