"""Instances as containers of engines, found by labels. A worker elsewhere discovers them, by DNS or by Docker, and an instance
has the name that it has there."""

import asyncio
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

import structlog
from typing_extensions import override

from pointsman.adapters.child_process import described_exit
from pointsman.adapters.daemon_threads import in_daemon_thread
from pointsman.adapters.discovery.targets import instance_name
from pointsman.adapters.docker_api import Docker, DockerMissingError
from pointsman.adapters.providers.names import free_names
from pointsman.adapters.providers.unasked_ends import UnaskedEnds
from pointsman.contracts.codec import short_reason
from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError, ProviderUnreachableError
from pointsman.primitives import InstanceId, PoolName, Seconds, WallSeconds

log = structlog.get_logger()

POOL_LABEL = "pointsman.pool"
PART_LABEL = "pointsman.part"
STOP_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
CALL_WALL_SECONDS = 30
LOG_FILES = {"max-size": "10m", "max-file": "5"}
LOG_LINES = 20
"""Kept, in the scaler's log, of a container that ended."""
ALIVE = ("created", "running", "restarting", "paused")
"""A paused engine keeps its cache."""
NOT_FOUND, CONFLICT = 404, 409

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTemplate:
    """`command` may contain {instance}, the container's name. `dns`: HOST:PORT of the workers' `--discover dns:HOST:PORT`,
    under which containers join `network`; empty: workers discover containers."""

    image: str
    command: str
    network: str
    dns: str = ""


class DockerProvider(InstanceProvider):
    name = "docker"

    def __init__(self, pool: PoolName, template: ContainerTemplate, *, url: str = "") -> None:
        """`url`: of the daemon; empty: from the environment. Raises ProviderError, ProviderUnreachableError."""
        self._pool = pool
        self._template = template
        try:
            daemon = Docker(url)
        except DockerMissingError as error:
            raise ProviderError(str(error)) from error
        self._errors, self._image_not_found = daemon.errors, daemon.image_not_found
        self._ends = UnaskedEnds()
        self._left: asyncio.Future[Any] | None = None
        """A call that goes on though its caller has given up."""
        try:
            self._docker: Any = daemon.connected(timeout=CALL_WALL_SECONDS)
        except self._errors as error:
            raise ProviderUnreachableError(
                f"Docker does not answer; start it, or say where it is by DOCKER_HOST: {error}"
            ) from error

    @override
    async def running(self) -> list[ProvidedInstance]:
        return await self._call(self._running)

    @override
    async def grow(self, total: int) -> None:
        await self._call(lambda: self._grow(total))

    @override
    async def stop(self, instance: InstanceId) -> None:
        await self._call(lambda: self._stop(instance))

    def _running(self) -> list[ProvidedInstance]:
        return [
            ProvidedInstance(self._instance(container), _age(container.attrs))
            for container in self._containers()
            if container.status in ALIVE
        ]

    def _instance(self, container: Any) -> InstanceId:
        """By its address where DNS is asked for it, else by its name; both as discovery does."""
        networks = container.attrs.get("NetworkSettings", {}).get("Networks") or {}
        address = networks.get(self._template.network, {}).get("IPAddress", "")
        port = self._template.dns.rpartition(":")[2]
        return instance_name(f"{address}-{port}" if port and address else container.name)

    def _grow(self, total: int) -> None:
        containers = self._containers()
        alive = {container.name for container in containers if container.status in ALIVE}
        for container in containers:
            if container.status == "exited":
                self._note_end(container)
            if container.name not in alive:
                self._remove(container)
        names = free_names([name.removeprefix(self._prefix) for name in alive])
        for name in islice(names, max(0, total - len(alive))):
            self._start(self._prefix + name)
        self._ends.tell()

    def _note_end(self, container: Any) -> None:
        """Before it is removed, with its log."""
        state, lines = container.attrs["State"], self._log_end(container)
        words = next((line for line in reversed(lines) if line), "")
        why = f"container {described_exit(int(state['ExitCode']), words)}"
        ran = _moment(state["FinishedAt"]) - _moment(state["StartedAt"])
        self._ends.note(container.name, short_reason(why), ran_seconds=max(0.0, ran.total_seconds()), lines=lines)

    def _log_end(self, container: Any) -> list[str]:
        """Empty where Docker does not give it, as behind the Docker gate."""
        try:
            text: bytes = container.logs(tail=LOG_LINES)
        except self._errors:
            return []
        return [short_reason(line.strip()) for line in text.decode(errors="replace").splitlines()]

    def _start(self, name: str) -> None:
        template = self._template
        alias = template.dns.rpartition(":")[0]
        try:
            container = self._docker.containers.create(  # not `run`, which pulls a missing image first
                template.image,
                [part.replace("{instance}", name) for part in shlex.split(template.command)],
                name=name,
                labels={POOL_LABEL: self._pool, PART_LABEL: "engine"},
                network=template.network,
                networking_config={
                    template.network: self._docker.api.create_endpoint_config(aliases=[alias] if alias else None)
                },
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                log_config={"type": "json-file", "config": LOG_FILES},
                detach=True,
            )
            container.start()
        except self._image_not_found as error:
            raise ProviderError(
                f"Docker has no image {template.image}; fetch it with: docker pull {template.image}"
            ) from error
        except self._errors as error:
            if getattr(error, "status_code", None) == CONFLICT:
                return  # another scaler was faster
            self._remove_unstarted(name)
            raise
        log.info("instance_started", container=name)

    def _remove_unstarted(self, name: str) -> None:
        """Else it would count as capacity."""
        for container in self._containers():
            if container.name == name and container.status == "created":
                self._remove(container)

    def _stop(self, instance: InstanceId) -> None:
        for container in self._containers():
            if self._instance(container) == instance:
                self._remove(container)

    def _remove(self, container: Any) -> None:
        try:
            container.stop(timeout=int(float(STOP_WALL_SECONDS)))
            container.remove(force=True)
        except self._errors as error:
            if getattr(error, "status_code", None) not in (NOT_FOUND, CONFLICT):
                raise

    def _containers(self) -> list[Any]:
        labels = [f"{POOL_LABEL}={self._pool}", f"{PART_LABEL}=engine"]
        found: list[Any] = self._docker.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return found

    @property
    def _prefix(self) -> str:
        return f"pointsman-{self._pool}-"

    async def _call(self, work: Callable[[], T]) -> T:
        """Docker's client blocks, so it runs in a thread, and nothing ends a thread: none is added to one that is left. Raises
        ProviderError."""
        if self._left is not None and not self._left.done():
            raise ProviderError("Docker has not answered an earlier call yet")
        thread = in_daemon_thread(work, "docker")
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._left = thread
            raise
        except self._errors as error:
            raise ProviderError(f"Docker: {error}") from error


def _age(attributes: Mapping[str, Any]) -> Seconds:
    return max(0.0, (datetime.now(UTC) - _moment(attributes["Created"])).total_seconds())


def _moment(text: object) -> datetime:
    """Whole seconds."""
    return datetime.fromisoformat(str(text)[:19]).replace(tzinfo=UTC)
