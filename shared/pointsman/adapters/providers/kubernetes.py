"""Instances as pods of a Deployment or StatefulSet; only the scale subresource is written, with the resource version
read, so concurrent writes conflict. A StatefulSet removes its highest ordinal; of a Deployment the chosen pod first
gets the lowest deletion cost."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import structlog
from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError
from pointsman.primitives import EngineSeconds, InstanceId

log = structlog.get_logger()

CALL_WALL_SECONDS = 10
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-2147483648"

Kind = Literal["deployment", "stateful_set"]
T = TypeVar("T")


class KubernetesProvider(InstanceProvider):
    def __init__(self, kind: Kind, workload: str, namespace: str, *, api_client: Any = None) -> None:
        """`api_client`: None uses the pod's service account, else the kubeconfig. Raises ProviderError."""
        try:
            from kubernetes import client, config
            from urllib3.exceptions import HTTPError  # a dependency of the client
        except ImportError as error:
            missing = "the kubernetes provider needs the official client: pip install 'pointsman[kubernetes]'"
            raise ProviderError(missing) from error
        self._errors: tuple[type[Exception], ...] = (client.ApiException, OSError, HTTPError)
        if api_client is None:
            try:
                _load_config(config)
            except config.ConfigException as error:
                unknown = f"no cluster is known: {error}"
                raise ProviderError(unknown) from error
        self._apps: Any = client.AppsV1Api(api_client)
        self._core: Any = client.CoreV1Api(api_client)
        self._kind = kind
        self._workload = workload
        self._namespace = namespace

    @property
    @override
    def name(self) -> str:
        return "kubernetes"

    @override
    async def running(self) -> list[ProvidedInstance]:
        pods = await self._call(self._pods)
        return [ProvidedInstance(InstanceId(pod.metadata.name), _age(pod)) for pod in pods]

    @override
    async def grow(self, total: int) -> None:
        await self._call(lambda: self._grow(total))

    @override
    async def stop(self, instance: InstanceId) -> None:
        await self._call(lambda: self._stop(instance))

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        if self._kind == "deployment" or not running:
            return running
        return [max(running, key=_ordinal)]

    def _pods(self) -> list[Any]:
        selector = self._scale().status.selector
        listed = self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, _request_timeout=CALL_WALL_SECONDS
        )
        return [
            pod
            for pod in listed.items
            if pod.metadata.deletion_timestamp is None and pod.status.phase in ("Pending", "Running")
        ]

    def _grow(self, total: int) -> None:
        scale = self._scale()
        if (scale.spec.replicas or 0) < total:
            self._set_replicas(scale, total)

    def _stop(self, instance: InstanceId) -> None:
        """Lowers replicas to one less than run, computed from the pods, so a repeated call does nothing more."""
        names = [pod.metadata.name for pod in self._pods()]
        scale = self._scale()
        if instance not in names:
            return
        if (scale.spec.replicas or 0) < len(names):
            return  # it was lowered already, and the pod is on its way out
        if instance not in self.stoppable([InstanceId(name) for name in names]):
            fixed = f"{instance} is not the last pod of {self._workload}: a StatefulSet takes away the last only"
            raise ProviderError(fixed)
        if self._kind == "deployment":
            body = {"metadata": {"annotations": {DELETION_COST: LOWEST_COST}}}
            self._core.patch_namespaced_pod(instance, self._namespace, body, _request_timeout=CALL_WALL_SECONDS)
        self._set_replicas(scale, max(0, len(names) - 1))

    def _scale(self) -> Any:
        read = getattr(self._apps, f"read_namespaced_{self._kind}_scale")
        return read(self._workload, self._namespace, _request_timeout=CALL_WALL_SECONDS)

    def _set_replicas(self, scale: Any, replicas: int) -> None:
        body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": replicas}}
        patch = getattr(self._apps, f"patch_namespaced_{self._kind}_scale")
        patch(self._workload, self._namespace, body, _request_timeout=CALL_WALL_SECONDS)
        log.info("replicas_set", workload=self._workload, before=scale.spec.replicas, after=replicas)

    async def _call(self, work: Callable[[], T]) -> T:
        """The client blocks, so it runs in a thread. Raises ProviderError."""
        try:
            return await asyncio.to_thread(work)
        except self._errors as error:
            reason = getattr(error, "reason", None) or error
            failed = f"Kubernetes, {self._kind} {self._namespace}/{self._workload}: {reason}"
            raise ProviderError(failed) from error


def _load_config(config: Any) -> None:
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()


def _ordinal(pod: str) -> int:
    tail = pod.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def _age(pod: Any) -> EngineSeconds:
    created = pod.metadata.creation_timestamp
    return max(0.0, (datetime.now(UTC) - created).total_seconds()) if created else 0.0
