"""That our API server of Kubernetes answers as a real one: the same tests over both, kubectl, Kubernetes' own schemas."""

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from tests.support.debian_programs import debian_program
from tests.support.kube_api import ADMIN_TOKEN
from tests.support.kube_cluster import (
    DISCOVERY_RULES,
    NAMESPACE,
    SLICES,
    WORKLOADS,
    ClusterAdmin,
    endpoint,
    endpoint_slice,
)
from tests.support.waiting import eventually

WATCHED = f"{SLICES}?watch=true&allowWatchBookmarks=true&labelSelector=app%3Dengine"
SCHEMAS_OF = "1.32"


def stateful_set(replicas: int) -> dict[str, Any]:
    labels = {"app": "engine"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "image": "engine"}]}}
    spec = {"replicas": replicas, "serviceName": "engine", "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "engine"}, "spec": spec}


async def watch(admin: ClusterAdmin, version: str, seconds: int) -> AsyncGenerator[dict[str, Any], None]:
    url = f"{admin.url}{WATCHED}&resourceVersion={version}&timeoutSeconds={seconds}"
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url, ssl=admin.ssl) as answer:
        assert answer.status == 200
        async for line in answer.content:
            yield json.loads(line)


async def version_now(admin: ClusterAdmin) -> str:
    _, listed = await admin.request("GET", SLICES)
    return str(listed["metadata"]["resourceVersion"])


async def test_a_watch_tells_what_happened_since_a_list_and_ends_with_a_bookmark(any_cluster: ClusterAdmin) -> None:
    """A real server sends bookmarks two seconds before the end, and none before it has seen a change."""
    version = await version_now(any_cluster)
    heard: list[dict[str, Any]] = []

    async def hear() -> None:
        async for event in watch(any_cluster, version, 2 if any_cluster.ours else 8):
            heard.append(event)  # noqa: PERF401 - they are looked at while they come

    hearing = asyncio.create_task(hear())
    await any_cluster.put(SLICES, endpoint_slice("a", endpoint("e", "10.0.0.1")))
    await eventually(lambda: bool(heard))
    await any_cluster.put(SLICES, endpoint_slice("a", endpoint("e", "10.0.0.2")))
    await any_cluster.put(SLICES, endpoint_slice("other", labels={"app": "web"}))
    await any_cluster.put(SLICES, endpoint_slice("a", labels={"app": "web"}))  # no longer selected
    await hearing
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in heard]

    assert [event["type"] for event in heard[:4]] == ["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    assert versions == sorted(versions)
    assert versions[0] > int(version)
    assert set(heard[-1]["object"]) <= {"kind", "apiVersion", "metadata", "spec", "endpoints", "addressType", "ports"}


async def test_a_version_too_old_is_gone(any_cluster: ClusterAdmin) -> None:
    await any_cluster.put(SLICES, endpoint_slice("a", endpoint("e", "10.0.0.1")))
    if any_cluster.ours:
        any_cluster.ours.forget()
    async with aclosing(watch(any_cluster, "1", 2)) as events:
        event = await anext(events)

    if any_cluster.ours is None and event["type"] == "ADDED":
        pytest.skip("this server still has its first version")  # 1.36 from its start on; 1.20 never
    assert event["type"] == "ERROR"
    assert {key: event["object"][key] for key in ("kind", "status", "reason", "code")} == {
        "kind": "Status", "status": "Failure", "reason": "Expired", "code": 410,
    }  # fmt: skip


async def test_a_list_in_pages_keeps_its_version(any_cluster: ClusterAdmin) -> None:
    for number in range(3):
        await any_cluster.put(SLICES, endpoint_slice(f"s{number}"))
    _, first = await any_cluster.request("GET", f"{SLICES}?limit=2")
    await any_cluster.put(SLICES, endpoint_slice("s9"))
    _, rest = await any_cluster.request("GET", f"{SLICES}?limit=2&continue={first['metadata']['continue']}")

    assert [item["metadata"]["name"] for item in first["items"]] == ["s0", "s1"]
    assert rest["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert not rest["metadata"].get("continue")
    assert rest["items"][0]["metadata"]["name"] == "s2"


async def test_a_stale_write_conflicts(any_cluster: ClusterAdmin) -> None:
    made = await any_cluster.create(f"{WORKLOADS}/statefulsets", stateful_set(1))
    path = f"{WORKLOADS}/statefulsets/engine/scale"
    _, scale = await any_cluster.request("GET", path)
    patch = {"metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]}, "spec": {"replicas": 3}}
    kinds = ["application/merge-patch+json"] * 2 + ["text/plain"]
    answers = [await any_cluster.request("PATCH", path, patch, content_type=kind) for kind in kinds]

    assert scale["metadata"]["uid"] == made["metadata"]["uid"]
    assert scale["status"]["selector"] == "app=engine"
    assert [status for status, _ in answers] == [200, 409, 415]
    assert answers[0][1]["spec"]["replicas"] == 3
    assert answers[1][1]["reason"] == "Conflict"
    assert "the object has been modified" in answers[1][1]["message"]


async def test_an_account_may_do_what_its_role_says_and_no_more(any_cluster: ClusterAdmin) -> None:
    token = await any_cluster.account("worker", DISCOVERY_RULES)
    elsewhere = SLICES.replace(NAMESPACE, "default")
    paths = [SLICES, f"{SLICES}/a", elsewhere, f"/api/v1/namespaces/{NAMESPACE}/pods"]
    answers = [await any_cluster.request("GET", path, token=token) for path in paths]
    stranger, _ = await any_cluster.request("GET", SLICES, token="nobody")

    assert [status for status, _ in answers] == [200, 403, 403, 403]
    assert stranger == 401
    assert answers[1][1]["message"] == (
        f'endpointslices.discovery.k8s.io "a" is forbidden: User "system:serviceaccount:{NAMESPACE}:worker" cannot get '
        f'resource "endpointslices" in API group "discovery.k8s.io" in the namespace "{NAMESPACE}"'
    )


async def test_kubectl_understands_it(cluster: ClusterAdmin) -> None:
    kubectl = debian_program("kubectl", "kubectl", "trixie")
    config = cluster.kubeconfig(ADMIN_TOKEN)
    assert cluster.ours
    cluster.ours.open_to_all = True

    async def run(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            kubectl, f"--kubeconfig={config}", "--cache-dir", config.parent / "cache", *arguments,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, trouble = await process.communicate()
        assert process.returncode == 0, trouble.decode()
        return out.decode()

    await cluster.put(SLICES, endpoint_slice("a", endpoint("e", "10.0.0.1")))
    await cluster.put(f"{WORKLOADS}/statefulsets", stateful_set(1))
    slices = json.loads(await run("get", "endpointslices", "-l", "app=engine", "-o", "json"))
    await run("scale", "statefulset/engine", "--replicas=4", "--current-replicas=1")
    replicas = await run("get", "statefulset", "engine", "-o", "jsonpath={.spec.replicas}")
    await run("delete", "endpointslice", "a", "--wait=false")

    assert [item["metadata"]["name"] for item in slices["items"]] == ["a"]
    assert replicas == "4"
    assert not [name for _, _, name in cluster.ours.objects if name == "a"]


async def test_what_it_serves_fits_the_schemas(cluster: ClusterAdmin) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    await cluster.put(
        SLICES, endpoint_slice("a", endpoint("e", "10.0.0.1", ready=True, serving=True, terminating=False))
    )
    await cluster.create(f"{WORKLOADS}/statefulsets", stateful_set(2))
    await cluster.account("worker", DISCOVERY_RULES)
    assert cluster.ours
    for served in cluster.ours.objects.values():
        validate(served, SCHEMAS_OF, strict=True)
