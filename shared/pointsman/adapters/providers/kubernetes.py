"""Instances as pods of a Deployment or StatefulSet; only the scale subresource is written, with the resource version
read, so concurrent writes conflict. A StatefulSet removes its highest ordinal; of a Deployment the chosen pod first
gets the lowest deletion cost."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import structlog
from typing_extensions import override

from pointsman.adapters.discovery.targets import instance_name
from pointsman.adapters.kubernetes_api import Cluster, ClusterError, reason_of
from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError
from pointsman.primitives import InstanceId, Seconds

log = structlog.get_logger()

CALL_WALL_SECONDS = 10
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-2147483648"
ALIVE = ("Pending", "Running")
STARTING = ("ContainerCreating", "PodInitializing")

Kind = Literal["deployment", "stateful_set"]


class KubernetesProvider(InstanceProvider):
    name = "kubernetes"

    def __init__(self, kind: Kind, workload: str, namespace: str) -> None:
        """Raises ProviderError."""
        try:
            self._cluster = Cluster()
        except ClusterError as error:
            raise ProviderError(str(error)) from error
        self._kind = kind
        self._workload = workload
        self._namespace = namespace

    @override
    async def running(self) -> list[ProvidedInstance]:
        async with self._connected() as api:
            pods = await self._pods(api, await self._scale(api))
            return [ProvidedInstance(instance, _age(pod), _problem(pod)) for instance, pod in pods.items()]

    @override
    async def grow(self, total: int) -> None:
        async with self._connected() as api:
            scale = await self._scale(api)
            if (scale.spec.replicas or 0) < total:
                await self._set_replicas(api, scale, total)

    @override
    async def stop(self, instance: InstanceId) -> None:
        """Lowers replicas to one less than run, computed from the pods, so a repeated call does nothing more."""
        async with self._connected() as api:
            scale = await self._scale(api)
            pods = await self._pods(api, scale)
            if instance not in pods:
                return
            if (scale.spec.replicas or 0) < len(pods):
                return  # it was lowered already, and the pod is on its way out
            if instance not in self.stoppable(list(pods)):
                raise ProviderError(
                    f"{instance} is not the last pod of {self._workload}: a StatefulSet takes away the last only"
                )
            if self._kind == "deployment":
                await self._mark(api, pods, instance)
            await self._set_replicas(api, scale, max(0, len(pods) - 1))

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        if self._kind == "deployment" or not running:
            return running
        return [max(running, key=_ordinal)]

    async def _mark(self, api: Any, pods: Mapping[InstanceId, Any], instance: InstanceId) -> None:
        """The only one marked: a mark may be left of a stop that failed. Raises ProviderError if another pod went first all
        the same."""
        chosen = pods[instance]
        sooner = sorted(name for name, pod in pods.items() if _stage(pod) < _stage(chosen))
        if sooner:
            raise ProviderError(
                f"{instance} is not stopped before {sooner[0]} is ready: Kubernetes would take that one away instead"
            )
        for pod in pods.values():
            if pod is not chosen and (pod.metadata.annotations or {}).get(DELETION_COST) == LOWEST_COST:
                await self._set_deletion_cost(api, pod, None)
        await self._set_deletion_cost(api, chosen, LOWEST_COST)

    async def _set_deletion_cost(self, api: Any, pod: Any, cost: str | None) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        core = self._cluster.client.CoreV1Api(api)
        await core.patch_namespaced_pod(pod.metadata.name, self._namespace, body, _request_timeout=CALL_WALL_SECONDS)

    async def _pods(self, api: Any, scale: Any) -> dict[InstanceId, Any]:
        """By the name that discovery gives them."""
        listed = await self._cluster.client.CoreV1Api(api).list_namespaced_pod(
            self._namespace, label_selector=scale.status.selector, _request_timeout=CALL_WALL_SECONDS
        )
        return {
            instance_name(pod.metadata.name): pod
            for pod in listed.items
            if pod.metadata.deletion_timestamp is None and pod.status.phase in ALIVE
        }

    async def _scale(self, api: Any) -> Any:
        read = getattr(self._cluster.client.AppsV1Api(api), f"read_namespaced_{self._kind}_scale")
        scale = await read(self._workload, self._namespace, _request_timeout=CALL_WALL_SECONDS)
        if not (scale.metadata and scale.spec and scale.status and scale.status.selector):
            unselective = f"the scale of {self._workload} names no pods"  # no selector would be every pod
            raise ProviderError(unselective)
        return scale

    async def _set_replicas(self, api: Any, scale: Any, replicas: int) -> None:
        body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": replicas}}
        patch = getattr(self._cluster.client.AppsV1Api(api), f"patch_namespaced_{self._kind}_scale")
        await patch(self._workload, self._namespace, body, _request_timeout=CALL_WALL_SECONDS)
        log.info("replicas_set", workload=self._workload, before=scale.spec.replicas, after=replicas)

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[Any, None]:
        """A connection for one operation: the scaler asks every few seconds. Raises ProviderError."""
        try:
            async with self._cluster.api() as api:
                yield api
        except self._cluster.errors as error:
            raise ProviderError(
                f"Kubernetes, {self._kind} {self._namespace}/{self._workload}: {reason_of(error)}"
            ) from error


def _ordinal(pod: str) -> int:
    tail = pod.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def _stage(pod: Any) -> tuple[bool, bool, bool]:
    """Of its start. A ReplicaSet removes pods of an earlier stage first, whatever their deletion cost."""
    conditions = pod.status.conditions or []
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in conditions)
    return bool(pod.spec.node_name), pod.status.phase == "Running", ready


def _age(pod: Any) -> Seconds:
    created = pod.metadata.creation_timestamp
    return max(0.0, (datetime.now(UTC) - created).total_seconds()) if created else 0.0


def _problem(pod: Any) -> str:
    """No node takes it, or a container waits for more than its turn."""
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    for container in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
        waiting = container.state and container.state.waiting
        if waiting and waiting.reason not in STARTING:
            return f"{waiting.reason}: {waiting.message}"
    return ""
