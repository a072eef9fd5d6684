"""Instances as pairs of containers, engine and worker, found by labels. Their names are unique in the host."""

import asyncio
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog
from typing_extensions import override

from pointsman.adapters.providers.names import free_names
from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, WallSeconds

log = structlog.get_logger()

POOL_LABEL = "pointsman.pool"
INSTANCE_LABEL = "pointsman.instance"
PART_LABEL = "pointsman.part"
CREDENTIALS = "POINTSMAN_NATS_CREDENTIALS"
STOP_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
CALL_WALL_SECONDS = 30
NOT_FOUND, CONFLICT = 404, 409

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTemplate:
    """`engine_command` may contain {instance}. Both containers join `network`, under their names."""

    engine_image: str
    engine_command: str
    worker_image: str
    network: str
    environment: Mapping[str, str]
    engine_port: int = 8000
    kv_port: int = 5557
    replay_port: int = 5558


class DockerProvider(InstanceProvider):
    def __init__(self, pool: PoolName, template: ContainerTemplate, *, url: str = "") -> None:
        """`url`: of the daemon; empty: from the environment. Raises ProviderError."""
        self._pool = pool
        self._template = template
        try:
            import docker
        except ImportError as error:
            missing = "the docker provider needs Docker's client: pip install 'pointsman[docker]'"
            raise ProviderError(missing) from error
        self._errors: tuple[type[Exception], ...] = (docker.errors.DockerException, OSError)
        try:
            self._docker: Any = (
                docker.DockerClient(base_url=url, timeout=CALL_WALL_SECONDS)
                if url
                else docker.from_env(timeout=CALL_WALL_SECONDS)
            )
        except self._errors as error:
            unreachable = f"Docker does not answer: {error}"
            raise ProviderError(unreachable) from error

    @property
    @override
    def name(self) -> str:
        return "docker"

    @override
    async def running(self) -> list[ProvidedInstance]:
        return await self._call(self._running)

    @override
    async def grow(self, total: int) -> None:
        await self._call(lambda: self._grow(total))

    @override
    async def stop(self, instance: InstanceId) -> None:
        await self._call(lambda: self._stop(instance))

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        return running

    def _running(self) -> list[ProvidedInstance]:
        return [
            ProvidedInstance(InstanceId(container.labels[INSTANCE_LABEL]), _age(container.attrs))
            for container in self._containers({PART_LABEL: "engine"})
            if container.status in ("created", "running", "restarting")
        ]

    def _grow(self, total: int) -> None:
        running = {provided.instance for provided in self._running()}
        self._sweep(running)
        for name in free_names(running):
            if len(running) >= total:
                return
            self._start(name)
            running.add(name)

    def _sweep(self, running: set[InstanceId]) -> None:
        for container in self._containers({}):
            if container.labels.get(INSTANCE_LABEL) not in running:
                self._remove(container)

    def _start(self, instance: InstanceId) -> None:
        template = self._template
        engine = self._container_name(instance, "engine")
        command = [part.replace("{instance}", instance) for part in shlex.split(template.engine_command)]
        own = {
            "POINTSMAN_INSTANCE": instance,
            "POINTSMAN_ENGINE_URL": f"http://{engine}:{template.engine_port}",
            "POINTSMAN_KV_ENDPOINT": f"tcp://{engine}:{template.kv_port}",
            "POINTSMAN_KV_REPLAY_ENDPOINT": f"tcp://{engine}:{template.replay_port}",
        }
        self._run(instance, "engine", template.engine_image, command, {})
        given = {name: value.replace("{instance}", instance) for name, value in template.environment.items()}
        self._run(instance, "worker", template.worker_image, None, {**given, **own})
        log.info("instance_started", instance=instance, container=engine)

    def _run(
        self, instance: InstanceId, part: str, image: str, command: list[str] | None, variables: Mapping[str, str]
    ) -> None:
        try:
            self._docker.containers.run(
                image,
                command,
                name=self._container_name(instance, part),
                labels={POOL_LABEL: self._pool, INSTANCE_LABEL: instance, PART_LABEL: part},
                environment=dict(variables),
                network=self._template.network,
                volumes={file: {"bind": file, "mode": "ro"} for file in [variables.get(CREDENTIALS, "")] if file},
                stop_signal="SIGINT" if part == "worker" else None,  # to a worker: its instance leaves for good
                detach=True,
            )
        except self._errors as error:
            if getattr(error, "status_code", None) != CONFLICT:
                raise

    def _stop(self, instance: InstanceId) -> None:
        """The worker first, so that it logs the instance's leave."""
        for part in ("worker", "engine"):
            for container in self._containers({INSTANCE_LABEL: instance, PART_LABEL: part}):
                self._remove(container)

    def _remove(self, container: Any) -> None:
        try:
            container.stop(timeout=int(float(STOP_WALL_SECONDS)))
            container.remove(force=True)
        except self._errors as error:
            if getattr(error, "status_code", None) not in (NOT_FOUND, CONFLICT):
                raise

    def _containers(self, labels: Mapping[str, str]) -> list[Any]:
        wanted = {POOL_LABEL: self._pool, **labels}
        found: list[Any] = self._docker.containers.list(
            all=True, filters={"label": [f"{name}={value}" for name, value in wanted.items()]}, ignore_removed=True
        )
        return found

    def _container_name(self, instance: InstanceId, part: str) -> str:
        return f"pointsman-{self._pool}-{instance}-{part}"

    async def _call(self, work: Callable[[], T]) -> T:
        """Docker's client blocks, so it runs in a thread. Raises ProviderError."""
        try:
            return await asyncio.to_thread(work)
        except self._errors as error:
            failed = f"Docker: {error}"
            raise ProviderError(failed) from error


def _age(attributes: Mapping[str, Any]) -> EngineSeconds:
    created = datetime.fromisoformat(str(attributes["Created"])[:19]).replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - created).total_seconds())
