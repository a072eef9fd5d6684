"""Instances as local processes, each with a supervisor (`runtime.instance_supervisor`) that outlives the scaler. A
supervisor inherits its instance's file lock, which shows that it runs and keeps two scalers from starting the same
name. Several pools may share a directory: NAME.pool beside NAME.lock names the pool. Without one the instance belongs to
whoever asks, because earlier releases did not write it."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import structlog
from typing_extensions import override

from pointsman.adapters.child_process import described_exit, spawn
from pointsman.adapters.file_lock import is_locked, try_lock
from pointsman.adapters.log_files import last_line, log_bytes
from pointsman.adapters.providers.names import free_names
from pointsman.adapters.providers.unasked_ends import UnaskedEnds
from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError
from pointsman.primitives import InstanceId, PoolName, Seconds, WallSeconds

log = structlog.get_logger()

STOP_WALL_SECONDS: WallSeconds = WallSeconds(26.0)
"""Bound before a supervisor and its processes are killed; worker and engine have 12 s each."""
POLL_WALL_SECONDS: WallSeconds = WallSeconds(0.05)
GROWTH_LOCK = "growth"
SPEC_VARIABLE = "POINTSMAN_SUPERVISED_INSTANCE"
"""Not an argument: arguments are everybody's to read, and it has the deployment's secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTemplate:
    """`engine`: command line with placeholders. `supervisor`: module. `guard`: file locked while the fleet lives."""

    engine: str
    supervisor: str
    environment: Mapping[str, str]
    guard: Path | None = None


ASKED_TO_END = (0, -signal.SIGTERM)
"""Exit codes of a supervisor that a scaler stopped; the second if it had just been started."""


@dataclass(slots=True, kw_only=True)
class _Supervisor:
    """Started here. `log_from`: bytes of its log at its start. `stopped`: here."""

    instance: InstanceId
    process: "subprocess.Popen[bytes]"
    started_at: Seconds
    log_from: int
    stopped: bool = False


class ProcessProvider(InstanceProvider):
    name = "process"

    def __init__(self, directory: Path, template: InstanceTemplate, pool: PoolName | None) -> None:
        """`pool` None: the instances of all pools. Raises ProviderError for an invalid command line."""
        self._directory = directory
        self._pool = pool
        self._template = template
        self._supervisors: list[_Supervisor] = []
        self._ends = UnaskedEnds()
        try:
            self._engine = shlex.split(template.engine)
        except ValueError as error:
            raise ProviderError(f"the engine's command line is not understood: {error}") from error
        if not self._engine:
            raise ProviderError("the process provider needs the engine's command line (--engine-command)")

    @override
    async def running(self) -> list[ProvidedInstance]:
        with _refusals("the instances here cannot be read"):
            self._reap()
            now = time.time()
            return [ProvidedInstance(name, max(0.0, now - started)) for name, started in self._running_instances()]

    @override
    async def grow(self, total: int) -> None:
        with self._growing():
            missing = total - len(self._running_instances())
            for name in islice(free_names([lock.stem for lock in self._held_locks()]), max(0, missing)):
                self._start(name)
        self._ends.tell()

    @override
    async def stop(self, instance: InstanceId) -> None:
        with _refusals(f"{instance} cannot be stopped"):
            await self._stop(instance)

    async def _stop(self, instance: InstanceId) -> None:
        if not is_locked(self._lock_file(instance)) or not self._is_ours(instance):
            return
        pid = self._supervisor_pid(instance)
        for supervisor in self._supervisors:
            supervisor.stopped |= supervisor.instance == instance
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if await self._ended(instance, STOP_WALL_SECONDS):
            return
        log.warning("instance_killed", instance=instance, after=STOP_WALL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not await self._ended(instance, STOP_WALL_SECONDS):
            raise ProviderError(f"{instance} (supervisor {pid}) does not end")

    def kill(self, instance: InstanceId) -> None:
        """Kill at once; does nothing while it starts or after it ended."""
        with contextlib.suppress(ProviderError, ProcessLookupError):
            os.kill(self._supervisor_pid(instance), signal.SIGQUIT)

    def _running_instances(self) -> list[tuple[InstanceId, float]]:
        """Of this pool, with the time of their start."""
        return [
            (InstanceId(lock.stem), lock.stat().st_mtime) for lock in self._held_locks() if self._is_ours(lock.stem)
        ]

    def _held_locks(self) -> list[Path]:
        """Of the instances of all pools."""
        return [lock for lock in sorted(self._directory.glob("*.lock")) if lock.stem != GROWTH_LOCK and is_locked(lock)]

    def _is_ours(self, instance: str) -> bool:
        try:
            owner = self._pool_file(instance).read_text()
        except OSError:
            return True
        return self._pool in (None, owner)

    @contextlib.contextmanager
    def _growing(self) -> Iterator[None]:
        with _refusals("an instance could not be started"):
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / f"{GROWTH_LOCK}.lock").open("ab") as lock:
                if not try_lock(lock):
                    raise ProviderError("another scaler starts instances here at this moment")
                yield

    def _start(self, name: InstanceId) -> None:
        spec = {
            "instance": name,
            "engine": self._engine,
            "environment": dict(self._template.environment),
            "guard": str(self._template.guard or ""),
            "logs": str(self._directory),
            "lock": str(self._lock_file(name)),
        }
        with self._lock_file(name).open("wb") as lock:
            self._pool_file(name).write_text(self._pool or "")  # before the lock, which makes it an instance
            if not try_lock(lock):
                raise ProviderError(f"{name} was started by another scaler")
            log_from = log_bytes(self._log_file(name))
            process = spawn(
                [sys.executable, "-m", self._template.supervisor],
                environment=os.environ | {SPEC_VARIABLE: json.dumps(spec)},
                output=self._log_file(name),
                pass_fds=(lock.fileno(),),
                session=True,
                parent_death=None,
            )
        self._supervisors.append(
            _Supervisor(instance=name, process=process, started_at=time.monotonic(), log_from=log_from)
        )
        log.info("instance_started", instance=name, supervisor=process.pid)

    def _supervisor_pid(self, instance: InstanceId) -> int:
        try:
            return int(self._lock_file(instance).read_text())
        except (OSError, ValueError) as error:
            raise ProviderError(f"{instance} is only just being started") from error

    async def _ended(self, instance: InstanceId, seconds: WallSeconds) -> bool:
        deadline = time.monotonic() + float(seconds)
        while is_locked(self._lock_file(instance)):
            if time.monotonic() > deadline:
                return False
            self._reap()
            await asyncio.sleep(float(POLL_WALL_SECONDS))
        return True

    def _reap(self) -> None:
        supervisors, self._supervisors = self._supervisors, []
        for supervisor in supervisors:
            code = supervisor.process.poll()
            if code is None:
                self._supervisors.append(supervisor)
            elif code not in ASKED_TO_END and not supervisor.stopped:
                why = last_line(self._log_file(supervisor.instance), supervisor.log_from) if code > 0 else ""
                ran_seconds = time.monotonic() - supervisor.started_at
                self._ends.note(
                    supervisor.instance, why or f"its supervisor {described_exit(code)}", ran_seconds=ran_seconds
                )

    def _lock_file(self, instance: InstanceId) -> Path:
        return self._directory / f"{instance}.lock"

    def _log_file(self, instance: InstanceId) -> Path:
        """Of its supervisor."""
        return self._directory / f"{instance}.log"

    def _pool_file(self, instance: str) -> Path:
        return self._directory / f"{instance}.pool"


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Of the operating system. Raises ProviderError."""
    try:
        yield
    except OSError as error:
        raise ProviderError(f"{what}: {error}") from error


async def stop_all(directory: Path) -> None:
    """Stop every instance of the directory, of all pools, also those starting, within twice the bound of one."""
    provider = _provider_of(directory)
    deadline = time.monotonic() + 2 * float(STOP_WALL_SECONDS)
    while (running := await provider.running()) and time.monotonic() < deadline:
        await asyncio.gather(*(provider.stop(provided.instance) for provided in running), return_exceptions=True)
        await asyncio.sleep(float(POLL_WALL_SECONDS))


async def kill_all(directory: Path) -> None:
    provider = _provider_of(directory)
    for provided in await provider.running():
        provider.kill(provided.instance)


def _provider_of(directory: Path) -> ProcessProvider:
    return ProcessProvider(directory, InstanceTemplate(supervisor="", engine="none", environment={}), pool=None)
