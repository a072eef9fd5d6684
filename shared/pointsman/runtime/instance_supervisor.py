"""Runs an engine and its worker, given a SupervisedInstance as JSON in the environment variable SPEC_VARIABLE. Outlives
the scaler that started it. Ends on SIGTERM, with its engine, or when the lock of the `guard` file is free (the fleet is
gone): first the worker, so that the instance leaves, then the engine. SIGQUIT, or the supervisor's death, kills both. It
ends by itself if the engine ends or the worker refuses its settings; its last line then says why. Another worker that ends
is started again."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import msgspec
import structlog

from pointsman.adapters.backoff import RestartBackoff
from pointsman.adapters.child_process import described_exit, end, kill_group, spawn
from pointsman.adapters.file_lock import is_locked
from pointsman.adapters.log_files import cut_if_large, last_line, log_bytes
from pointsman.adapters.providers.process import SPEC_VARIABLE
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports
from pointsman.contracts.codec import short_reason
from pointsman.primitives import Seconds
from pointsman.runtime.engine_command import EnginePlaces, engine_environment
from pointsman.runtime.settings import environment
from pointsman.runtime.supervision import STOP_SECONDS_MAX

log = structlog.get_logger()

POLL_SECONDS: Seconds = 0.1
CHECK_SECONDS: Seconds = 1.0
"""Between two looks at the guard, and at the size of the logs."""
STOP_SECONDS: Seconds = STOP_SECONDS_MAX + 2.0
"""For the worker, then for the engine; above a service's own bound."""
WRONG_SETTINGS_CODE = 2


class SupervisedInstance(msgspec.Struct, frozen=True):
    """See `adapters.providers.process.InstanceTemplate`. `logs`: directory of log files."""

    instance: str
    engine: list[str]
    environment: dict[str, str]
    guard: str
    logs: str
    lock: str


class InstanceSupervisor:
    def __init__(self, spec: SupervisedInstance, sockets: Path) -> None:
        self._spec = spec
        self._stopping = False
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._log_from: dict[str, int] = {}
        """Bytes of a part's log when it was started."""
        self._backoff = RestartBackoff()
        self._worker_due_at: float | None = None
        """Set while no worker runs."""
        self._checked_at = float("-inf")
        port, kv_port, replay_port = free_ports(3)
        self._places = EnginePlaces(
            instance=spec.instance,
            port=port,
            kv=f"ipc://{sockets}/kv",
            replay=f"ipc://{sockets}/replay",
            kv_port=kv_port,
            replay_port=replay_port,
        )

    def stop(self) -> None:
        self._stopping = True

    def kill(self) -> None:
        self._stopping = True
        for process in self._running.values():
            kill_group(process)

    def run(self) -> str:
        """Returns why it ended by itself, "" if it was stopped."""
        try:
            self._spawn("engine", self._places.filled(self._spec.engine), engine_environment(os.environ))
            self._start_worker()
            trouble = self._trouble_while_running()
        except OSError as error:
            trouble = short_reason(f"it cannot be started: {error}")
        for part, number in (("worker", signal.SIGINT), ("engine", signal.SIGTERM)):
            if part in self._running:
                end(self._running[part], number, STOP_SECONDS)
        return trouble

    def _trouble_while_running(self) -> str:
        """Why it cannot go on, "" once it is stopped. Raises OSError."""
        while not self._stopping:
            if (code := self._running["engine"].poll()) is not None:
                return self._ended("engine", code)
            if (code := self._running["worker"].poll()) is not None:
                if code == WRONG_SETTINGS_CODE:
                    return self._ended("worker", code)
                self._restart_worker(code)
            self._check()
            time.sleep(POLL_SECONDS)
        return ""

    def _ended(self, part: str, code: int) -> str:
        words = last_line(self._log_file(part), self._log_from[part])
        return short_reason(f"{part} {described_exit(code, words)}")

    def _restart_worker(self, code: int) -> None:
        """Once it is due."""
        now = time.monotonic()
        if self._worker_due_at is None:
            wait = self._backoff.wait(now)
            self._worker_due_at = now + wait
            log.warning("worker_ended", why=self._ended("worker", code), restart_seconds=wait)
        if now >= self._worker_due_at:
            self._worker_due_at = None
            self._start_worker()

    def _check(self) -> None:
        """Whether the fleet is gone, and whether the logs are too large. Now and then."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now
        self._stopping |= self._fleet_gone()
        for part in ("", "engine", "worker"):
            with contextlib.suppress(OSError):
                cut_if_large(self._log_file(part))

    def _start_worker(self) -> None:
        kv_endpoint, kv_replay_endpoint = self._places.sockets(self._spec.engine)
        own = environment(
            {
                "instance": self._spec.instance,
                "engine_url": f"http://{LOOPBACK}:{self._places.port}",
                "kv_endpoint": kv_endpoint,
                "kv_replay_endpoint": kv_replay_endpoint,
                "host": LOOPBACK,
                "port": 0,
            }
        )
        given = {
            name: value.replace("{instance}", self._spec.instance) for name, value in self._spec.environment.items()
        }
        script = str(Path(sysconfig.get_path("scripts")) / "pointsman-worker")
        self._spawn("worker", [script], os.environ | given | own)

    def _spawn(self, part: str, command: list[str], variables: dict[str, str]) -> None:
        self._log_from[part] = log_bytes(self._log_file(part))
        self._running[part] = spawn(
            command,
            output=self._log_file(part),
            environment=variables,
            parent_death=signal.SIGTERM if part == "engine" else signal.SIGKILL,
        )

    def _log_file(self, part: str) -> Path:
        """Of the supervisor itself: ""."""
        name = f"{self._spec.instance}-{part}" if part else self._spec.instance
        return Path(self._spec.logs) / f"{name}.log"

    def _fleet_gone(self) -> bool:
        if not self._spec.guard:
            return False
        with contextlib.suppress(OSError):
            return not is_locked(Path(self._spec.guard))
        return True


def main() -> None:
    spec = msgspec.json.decode(os.environ.pop(SPEC_VARIABLE), type=SupervisedInstance)
    Path(spec.lock).write_text(str(os.getpid()))
    sockets = Path(tempfile.mkdtemp(prefix="pointsman-"))
    try:
        supervisor = InstanceSupervisor(spec, sockets)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop())
        signal.signal(signal.SIGQUIT, lambda *_: supervisor.kill())
        sys.exit(supervisor.run() or 0)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main()
