"""Runs an engine and its worker, given a SupervisedInstance as JSON in the environment variable SPEC_VARIABLE. Outlives
the scaler that started it. Ends on SIGTERM, with its engine, or when the lock of the `guard` file is free (the fleet is
gone): first the worker, so that the instance leaves, then the engine. SIGQUIT, or the supervisor's death, kills both."""

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

from pointsman.adapters.child_process import end, kill_group, spawn
from pointsman.adapters.file_lock import is_locked
from pointsman.adapters.providers.process import SPEC_VARIABLE
from pointsman.adapters.tcp_ports import LOOPBACK, free_ports
from pointsman.primitives import Seconds
from pointsman.runtime.engine_command import EnginePlaces, engine_environment
from pointsman.runtime.settings import environment
from pointsman.runtime.supervision import STOP_SECONDS_MAX

POLL_SECONDS: Seconds = 0.1
GUARD_SECONDS: Seconds = 1.0
STOP_SECONDS: Seconds = STOP_SECONDS_MAX + 2.0
"""For the worker, then for the engine; above a service's own bound."""
WORKER_RESTART_SECONDS: Seconds = 1.0


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

    def run(self) -> int:
        """Returns the engine's exit code, 0 if stopped."""
        engine = self._spawn("engine", self._places.filled(self._spec.engine), engine_environment(os.environ))
        worker = self._start_worker()
        guarded_at = 0.0
        while not self._stopping and engine.poll() is None:
            time.sleep(POLL_SECONDS)
            if worker.poll() is not None:
                time.sleep(WORKER_RESTART_SECONDS)
                worker = self._start_worker()
            if time.monotonic() - guarded_at > GUARD_SECONDS:
                guarded_at = time.monotonic()
                self._stopping |= self._fleet_gone()
        code = engine.poll()
        end(worker, signal.SIGINT, STOP_SECONDS)
        end(engine, signal.SIGTERM, STOP_SECONDS)
        return code or 0

    def _start_worker(self) -> "subprocess.Popen[bytes]":
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
        return self._spawn("worker", [script], os.environ | given | own)

    def _spawn(self, part: str, command: list[str], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
        process = spawn(
            command,
            output=Path(self._spec.logs) / f"{self._spec.instance}-{part}.log",
            environment=variables,
            parent_death=signal.SIGTERM if part == "engine" else signal.SIGKILL,
        )
        self._running[part] = process
        return process

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
        sys.exit(supervisor.run())
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


if __name__ == "__main__":
    main()
