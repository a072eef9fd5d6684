"""One process of a fleet: has its own log file and process group, and ends with `up` (on Linux)."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from http import HTTPStatus
from pathlib import Path

from typing_extensions import override

from pointsman.adapters.backoff import RestartBackoff
from pointsman.adapters.child_process import kill_group, spawn
from pointsman.adapters.log_files import last_line, log_bytes, log_end
from pointsman.adapters.tcp_ports import LOOPBACK
from pointsman.runtime.embedded_nats import NatsStartError, start_nats
from pointsman.runtime.log_connection import LOST_EVENT
from pointsman_cli.up.plan import ProcessPlan
from pointsman_cli.up.probe import NoAnswerError, http_get
from pointsman_cli.up.scripts import MissingScriptError, console_script

POLL_SECONDS = 0.05
READY_PROBE_SECONDS = 2.0
TAIL_LINES = 15
LAST_LINE_CHARS_MAX = 100
LOST_COUNT = re.compile(r'\bcount(?:=|": ?)(\d+)')


START_ERRORS = (MissingScriptError, NatsStartError, OSError)


class ChildProcess(ABC):
    def __init__(self, *, name: str, role: str, url: str, log_file: Path) -> None:
        self.name = name
        self.role = role
        self.url = url
        self.admin_url = ""
        self.log_file = log_file
        self.waiting_for = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = RestartBackoff()
        self._stopped_from: int | None = None
        """Bytes of its log when it was told to stop."""
        self._began_from = log_bytes(self.log_file)

    @abstractmethod
    async def start(self) -> None:
        """Raises START_ERRORS."""

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether it can do its work, and nothing is missing."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process else None

    async def exited(self) -> int:
        """Wait for its exit code (negative: signal); kills what it left running."""
        while (code := self.exit_code) is None:  # noqa: ASYNC110 - waiting for a process without a thread is polling
            await asyncio.sleep(POLL_SECONDS)
        if self._process:
            kill_group(self._process)
        return code

    def restart_wait(self) -> float:
        return self._backoff.wait(time.monotonic())

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.poll() is None:
            if self._stopped_from is None:
                self._stopped_from = log_bytes(self.log_file)
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            kill_group(self._process)

    def log_tail(self) -> list[str]:
        """Of this run of the fleet; the file goes on from earlier ones."""
        return log_end(self.log_file, self._began_from)[-TAIL_LINES:]

    def writes_lost_at_stop(self) -> int:
        """Of its log events, by its log; 0 before it was told to stop."""
        if self._stopped_from is None:
            return 0
        return sum(map(lost_writes, log_end(self.log_file, self._stopped_from)))


class ServiceProcess(ChildProcess):
    def __init__(self, plan: ProcessPlan, logs: Path) -> None:
        super().__init__(name=plan.name, role=plan.role, url=plan.url, log_file=logs / f"{plan.name}.log")
        self.admin_url = plan.admin_url
        self._plan = plan

    @override
    async def start(self) -> None:
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        foreign = self._plan.foreign
        program = self._plan.script if foreign else str(console_script(self._plan.script))
        process = spawn(
            [program, *self._plan.arguments],
            output=self.log_file,
            environment=self._plan.environment_in(os.environ),
            parent_death=signal.SIGTERM if foreign else signal.SIGKILL,
        )
        if self._plan.niceness > os.getpriority(os.PRIO_PROCESS, 0):  # less than that only root may have
            os.setpriority(os.PRIO_PROCESS, process.pid, self._plan.niceness)
        return process

    @override
    async def is_ready(self) -> bool:
        try:
            status, body = await http_get(self._plan.probe_url, timeout=READY_PROBE_SECONDS)
        except NoAnswerError:
            self.waiting_for = (
                last_line(self.log_file, self._began_from)[:LAST_LINE_CHARS_MAX] if self._plan.foreign else ""
            )
            return False
        missing = missing_parts(body)
        self.waiting_for = ", ".join(f"{part}: {reason}" for part, reason in missing.items())
        if status != HTTPStatus.OK:
            self.waiting_for = self.waiting_for or "not ready"
        return status == HTTPStatus.OK and not missing

    @override
    def stop(self) -> None:
        """On SIGINT an ingress skips its lame-duck phase, and a worker's instance leaves the fleet."""
        self._signal(signal.SIGTERM if self._plan.foreign else signal.SIGINT)


class NatsProcess(ChildProcess):
    def __init__(self, *, port: int, store: Path, sync_interval: str, accounts: str) -> None:
        super().__init__(name="nats", role="nats", url=f"nats://{LOOPBACK}:{port}", log_file=store / "nats-server.log")
        self._port = port
        self._store = store
        self._sync_interval = sync_interval
        self._accounts = accounts

    @override
    async def start(self) -> None:
        server = await start_nats(self._store, self._port, sync_interval=self._sync_interval, accounts=self._accounts)
        self._process = server.process

    @override
    async def is_ready(self) -> bool:
        return self.exit_code is None  # start_nats returns when it answers


def lost_writes(line: str) -> int:
    """By a line of a service's log, as text or JSON."""
    found = LOST_COUNT.search(line) if LOST_EVENT in line else None
    return int(found[1]) if found else 0


def missing_parts(body: bytes) -> dict[str, str]:
    """What /readyz reports as missing or degraded, with reasons."""
    try:
        answer = json.loads(body)
        return {**answer["missing"], **answer["degraded"]}
    except (ValueError, KeyError, TypeError):
        return {}
