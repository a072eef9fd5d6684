"""Instances as pods, scaled with the rights that docs/engines.md gives and no more. Pods are made and removed by a
controller of this test, which does at once what the scale says."""

from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.discovery.targets import annotated_targets
from pointsman.adapters.providers.kubernetes import DELETION_COST, LOWEST_COST, Kind, KubernetesProvider
from pointsman.ports import ProviderError
from pointsman.primitives import InstanceId
from tests.support.kube_cluster import NAMESPACE, NEEDS_CLIENT, PODS, WORKLOADS, ClusterAdmin, our_cluster
from tests.support.kube_requests import scale_of

pytestmark = NEEDS_CLIENT

PLURALS: dict[Kind, str] = {"deployment": "deployments", "stateful_set": "statefulsets"}
LABELS = {"app": "engine"}
CONTAINER = {"name": "engine", "image": "engine"}


def rules(kind: Kind) -> list[dict[str, Any]]:
    """What a scaler needs."""
    pods = ["list", "patch"] if kind == "deployment" else ["list"]
    return [
        {"apiGroups": ["apps"], "resources": [f"{PLURALS[kind]}/scale"], "resourceNames": ["engine"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": pods},
    ]  # fmt: skip


def waiting(reason: str, message: str | None) -> dict[str, Any]:
    state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}
    return {"name": "engine", "image": "engine", "imageID": "", "ready": False, "restartCount": 0, "state": state}


def annotations_of(pod: dict[str, Any]) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}


class Workload:
    """A Deployment or StatefulSet `engine` and its controller."""

    def __init__(self, admin: ClusterAdmin, kind: Kind) -> None:
        self.admin = admin
        self.pods_named = "engine"
        self.path = f"{WORKLOADS}/{PLURALS[kind]}"
        self.kind = "Deployment" if kind == "deployment" else "StatefulSet"

    async def make(self, replicas: int) -> None:
        template: dict[str, Any] = {"metadata": {"labels": LABELS}, "spec": {"containers": [CONTAINER]}}
        spec: dict[str, Any] = {"replicas": replicas, "selector": {"matchLabels": LABELS}, "template": template}
        if self.kind == "StatefulSet":
            spec["serviceName"] = "engine"
        body = {"apiVersion": "apps/v1", "kind": self.kind, "metadata": {"name": "engine"}, "spec": spec}
        await self.admin.create(self.path, body)
        await self.settle()

    async def replicas(self) -> int:
        _, found = await self.admin.request("GET", f"{self.path}/engine")
        return int(found["spec"]["replicas"])

    async def pods(self) -> list[dict[str, Any]]:
        _, listed = await self.admin.request("GET", f"{PODS}?labelSelector=app%3Dengine")
        pods: list[dict[str, Any]] = listed["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    async def set_ready(self, pod: str, *, ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        await self.admin.patch_status(f"{PODS}/{pod}", {"phase": "Running", "conditions": [condition]})

    async def marked(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in await self.pods() if DELETION_COST in annotations_of(pod)]

    async def settle(self) -> None:
        """One pass of the controller."""
        wanted, pods = await self.replicas(), await self.pods()
        await self.admin.patch_status(f"{self.path}/engine", {"replicas": wanted})
        for ordinal in range(len(pods), wanted):
            name = f"{self.pods_named}-{ordinal}"
            made = {"metadata": {"name": name, "labels": LABELS}, "spec": {"containers": [CONTAINER]}}
            await self.admin.create(PODS, {"apiVersion": "v1", "kind": "Pod", **made})
            await self.set_ready(name, ready=True)
        marked = [pod for pod in pods if DELETION_COST in annotations_of(pod)]
        going = (marked + pods[::-1])[: max(0, len(pods) - wanted)]
        for pod in going:
            await self.admin.delete(f"{PODS}/{pod['metadata']['name']}?gracePeriodSeconds=0")


async def workload(
    admin: ClusterAdmin, kind: Kind, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Workload, KubernetesProvider]:
    monkeypatch.setenv("KUBECONFIG", str(admin.kubeconfig(await admin.account("scaler", rules(kind)))))
    made = Workload(admin, kind)
    await made.make(replicas)
    return made, KubernetesProvider(kind, "engine", NAMESPACE)


async def names(provider: KubernetesProvider) -> list[str]:
    return sorted(provided.instance for provided in await provider.running())


async def test_a_stateful_set_grows_to_a_number_and_gives_up_only_its_last_pod(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, provider = await workload(any_cluster, "stateful_set", 1, monkeypatch)
    await provider.grow(3)
    await provider.grow(3)
    await engine.settle()
    grown = await names(provider)
    running = [InstanceId(name) for name in grown]
    with pytest.raises(ProviderError, match="the last"):
        await provider.stop(InstanceId("engine-0"))
    await provider.stop(InstanceId("engine-2"))
    await engine.settle()
    await provider.stop(InstanceId("engine-2"))
    left = await names(provider)
    replicas = await engine.replicas()

    assert grown == ["engine-0", "engine-1", "engine-2"]
    assert provider.stoppable(running) == ["engine-2"]
    assert left == ["engine-0", "engine-1"]
    assert replicas == 2


async def test_of_a_deployment_the_pod_that_shall_go_is_marked_first(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, provider = await workload(any_cluster, "deployment", 3, monkeypatch)
    await provider.stop(InstanceId("engine-0"))
    await provider.stop(InstanceId("engine-1"))  # the pod on its way out counts: not a second one
    await engine.settle()
    left = await names(provider)
    replicas = await engine.replicas()

    assert left == ["engine-1", "engine-2"]
    assert replicas == 2


@pytest.mark.parametrize("pods_named", ["qwen2.5-7b", f"{'long-' * 13}model"])
async def test_an_instance_has_the_name_that_discovery_gives_its_pod(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch, pods_named: str
) -> None:
    engine, provider = await workload(any_cluster, "deployment", 0, monkeypatch)
    engine.pods_named = pods_named
    await provider.grow(2)
    await engine.settle()
    grown = [provided.instance for provided in await provider.running()]
    discovered = [
        target.instance
        for number in range(2)
        for target in annotated_targets({}, name=f"{pods_named}-{number}", host="10.0.0.1", port=8000)
    ]
    await provider.stop(grown[0])
    marked = await engine.marked()

    assert grown == discovered
    assert marked == [f"{pods_named}-0"]


async def test_a_pod_is_marked_alone_and_only_if_it_is_the_next_to_go(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes removes pods that are not ready first, whatever their cost."""
    engine, provider = await workload(any_cluster, "deployment", 3, monkeypatch)
    await engine.admin.request(
        "PATCH",
        f"{PODS}/engine-1",
        {"metadata": {"annotations": {DELETION_COST: LOWEST_COST}}},
        content_type="application/merge-patch+json",
    )  # left of a stop that failed
    await engine.set_ready("engine-2", ready=False)
    with pytest.raises(ProviderError, match="not stopped before engine-2 is ready"):
        await provider.stop(InstanceId("engine-0"))
    before = await engine.marked(), await engine.replicas()
    await engine.set_ready("engine-2", ready=True)
    await provider.stop(InstanceId("engine-0"))
    after = await engine.marked(), await engine.replicas()

    assert before == (["engine-1"], 3)
    assert after == (["engine-0"], 2)


async def test_a_pod_that_is_not_ready_can_be_stopped(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, provider = await workload(any_cluster, "deployment", 2, monkeypatch)
    await engine.set_ready("engine-1", ready=False)
    await provider.stop(InstanceId("engine-1"))
    await engine.settle()
    left = await names(provider)

    assert left == ["engine-0"]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]}, "Unschedulable: no GPU"),
        ({"containerStatuses": [waiting("ImagePullBackOff", "no such image")]}, "ImagePullBackOff: no such image"),
        ({"initContainerStatuses": [waiting("CrashLoopBackOff", "back-off 10s")]}, "CrashLoopBackOff: back-off 10s"),
        ({"containerStatuses": [waiting("ContainerCreating", None)]}, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, ""),
    ],
)  # fmt: skip
async def test_what_keeps_a_pod_from_starting_is_told(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch, status: dict[str, Any], problem: str
) -> None:
    engine, provider = await workload(any_cluster, "stateful_set", 2, monkeypatch)
    await engine.admin.patch_status(f"{PODS}/engine-1", {"phase": "Pending", **status})
    told = {provided.instance: provided.problem for provided in await provider.running()}

    assert told == {"engine-0": "", "engine-1": problem}


async def test_a_scale_that_another_changed_meanwhile_is_trouble_and_not_overwritten(
    any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, provider = await workload(any_cluster, "stateful_set", 1, monkeypatch)
    read = provider._scale

    async def overtaken(api: Any) -> Any:
        scale = await read(api)
        _, found = await engine.admin.request("GET", f"{engine.path}/engine")
        found["spec"]["replicas"] = 5
        await engine.admin.put(engine.path, found)
        return scale

    provider._scale = overtaken  # type: ignore[method-assign]
    with pytest.raises(ProviderError, match=r"409 .*the object has been modified"):
        await provider.grow(2)
    replicas = await engine.replicas()

    assert replicas == 5


async def test_what_its_role_does_not_allow_is_told(any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, provider = await workload(any_cluster, "stateful_set", 2, monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(engine.admin.kubeconfig(await engine.admin.account("reader", []))))
    with pytest.raises(ProviderError, match=r"403 .* cannot get resource"):
        await KubernetesProvider("stateful_set", "engine", NAMESPACE).running()
    with pytest.raises(ProviderError, match=r"403 .* cannot get resource"):
        await KubernetesProvider("stateful_set", "another", NAMESPACE).running()
    pods = await names(provider)

    assert pods == ["engine-0", "engine-1"]


async def test_a_cluster_that_does_not_answer_or_is_unknown_is_trouble_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with our_cluster(tmp_path) as admin:
        _, provider = await workload(admin, "stateful_set", 1, monkeypatch)
        await provider.running()
    with pytest.raises(ProviderError, match="Kubernetes"):
        await provider.running()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ProviderError, match="no cluster is known"):
        KubernetesProvider("stateful_set", "engine", NAMESPACE)


async def test_a_scale_without_a_selector_is_not_every_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with our_cluster(tmp_path) as admin:
        _, provider = await workload(admin, "stateful_set", 1, monkeypatch)
        without = lambda found: {**scale_of(found), "status": {"replicas": 1}}  # noqa: E731
        monkeypatch.setattr("tests.support.kube_api.scale_of", without)
        with pytest.raises(ProviderError, match="names no pods"):
            await provider.running()
