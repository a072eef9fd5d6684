"""A cluster to test against: our API server, or a real kube-apiserver with etcd where KUBEBUILDER_ASSETS names a
directory with both programs (the variable of Kubernetes' own test tools). Seeded over HTTP, the same way for both."""

import json
import os
import ssl
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.adapters.tcp_ports import free_ports
from tests.support.kube_api import ADMIN_TOKEN, KubeApi
from tests.support.waiting import eventually

NAMESPACE = "vllm"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
WORKLOADS = f"/apis/apps/v1/namespaces/{NAMESPACE}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
MADE = (SLICES, PODS, f"{WORKLOADS}/statefulsets", f"{WORKLOADS}/deployments")
ACCOUNTS = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
RBAC = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
START_SECONDS_MAX = 60
FIRST_MINOR_WITH_SLICES = 21

NEEDS_CLIENT = pytest.mark.skipif(
    find_spec("kubernetes_asyncio") is None, reason="the kubernetes client is not installed"
)
"""Importing it takes seconds, so only what is under test does, at its first use."""
SERVERS = ["ours", "real"] if os.environ.get(ASSETS_VARIABLE) else ["ours"]

DISCOVERY_RULES = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
"""What docs/engines.md and deploy/kubernetes give a worker."""


class ClusterAdmin:
    """Seeds a cluster and makes accounts in it. `ours`: None of a real cluster."""

    def __init__(
        self, url: str, directory: Path, *, certificate: Path | None = None, ours: KubeApi | None = None
    ) -> None:
        self.url = url
        self.ours = ours
        self.real: RealCluster | None = None
        self._directory = directory
        self._certificate = certificate
        self.ssl: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(certificate)) if certificate else True

    async def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", token: str = ""
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or ADMIN_TOKEN}", "Content-Type": content_type}
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body, headers=headers, ssl=self.ssl) as answer:  # fmt: skip
            return answer.status, await answer.json() if "json" in answer.content_type else await answer.text()

    async def create(self, path: str, body: Any) -> Any:
        status, answer = await self.request("POST", path, body)
        assert status in (200, 201) or (status == 409 and answer["reason"] == "AlreadyExists"), answer
        return answer

    async def put(self, path: str, body: Any) -> Any:
        """As it is in the cluster, with `body` over it."""
        name = body["metadata"]["name"]
        status, found = await self.request("GET", f"{path}/{name}")
        if status == 404:
            return await self.create(path, body)
        metadata = {**body["metadata"], "resourceVersion": found["metadata"]["resourceVersion"]}
        status, answer = await self.request("PUT", f"{path}/{name}", {**found, **body, "metadata": metadata})
        assert status == 200, answer
        return answer

    async def delete(self, path: str) -> None:
        status, answer = await self.request("DELETE", path)
        assert status in (200, 404), answer

    async def stop(self) -> None:
        if self.ours:
            await self.ours.stop()
        if self.real:
            self.real.stop_api()

    async def start(self) -> None:
        """Where it was."""
        if self.ours:
            await self.ours.start()
        if self.real:
            self.real.start_api()
            await self.real.ready()

    async def patch_status(self, path: str, status: Any) -> None:
        code, answer = await self.request("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")
        assert code == 200, answer

    async def clear(self) -> None:
        """Of what tests make."""
        for path in MADE:
            _, listed = await self.request("GET", path)
            for item in listed["items"]:
                await self.delete(f"{path}/{item['metadata']['name']}?gracePeriodSeconds=0")

    async def account(self, name: str, rules: Sequence[Any]) -> str:
        """A service account's token, with a Role of these rules."""
        await self.create(ACCOUNTS, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
        version = "rbac.authorization.k8s.io/v1"
        await self.put(f"{RBAC}/roles", {"apiVersion": version, "kind": "Role", "metadata": {"name": name}, "rules": list(rules)})  # fmt: skip
        binding = {
            "apiVersion": version, "kind": "RoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
        }  # fmt: skip
        await self.put(f"{RBAC}/rolebindings", binding)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        answer = await self.create(f"{ACCOUNTS}/{name}/token", request)
        return str(answer["status"]["token"])

    def kubeconfig(self, token: str) -> Path:
        path = self._directory / f"kubeconfig-{abs(hash(token))}"
        authority = {"certificate-authority": str(self._certificate)} if self._certificate else {}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        }  # fmt: skip
        path.write_text(json.dumps(config))
        return path

    async def prepare(self) -> None:
        await self.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )


@asynccontextmanager
async def our_cluster(directory: Path) -> AsyncGenerator[ClusterAdmin, None]:
    async with KubeApi().serving() as ours:
        admin = ClusterAdmin(ours.url, directory, ours=ours)
        await admin.prepare()
        yield admin


class RealCluster:
    """etcd and kube-apiserver as processes."""

    def __init__(self, directory: Path) -> None:
        self._programs = Path(os.environ[ASSETS_VARIABLE])
        self.directory = directory
        self._etcd_port, self._peer_port, self.port = free_ports(3)
        self._processes: list[subprocess.Popen[bytes]] = []
        (directory / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        subprocess.run(["openssl", "genrsa", "-out", directory / "sa.key", "2048"], check=True, capture_output=True)

    def start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        self._start(
            "etcd", "--data-dir", str(self.directory / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        )  # fmt: skip

    def start_api(self) -> None:
        self._start(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", "--advertise-address=10.255.0.1", f"--cert-dir={self.directory / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self.directory / 'sa.key'}",
            f"--service-account-key-file={self.directory / 'sa.key'}", "--authorization-mode=RBAC", *self._extra(),
            f"--token-auth-file={self.directory / 'tokens.csv'}", "--disable-admission-plugins=ServiceAccount",
        )  # fmt: skip

    def _extra(self) -> list[str]:
        """Servers before 1.21 have no discovery.k8s.io/v1; a custom resource stands in, if the group is free."""
        told = subprocess.run(
            [self._programs / "kube-apiserver", "--version"], check=True, capture_output=True, text=True
        )
        minor = int(told.stdout.split(".")[1])
        return ["--runtime-config=discovery.k8s.io/v1beta1=false"] if minor < FIRST_MINOR_WITH_SLICES else []

    def stop_api(self) -> None:
        api = self._processes.pop()
        api.kill()
        api.wait()

    def stop(self) -> None:
        while self._processes:
            self.stop_api()

    async def ready(self) -> ClusterAdmin:
        certificate = self.directory / "certs/apiserver.crt"
        await eventually(certificate.exists, seconds=START_SECONDS_MAX)
        admin = ClusterAdmin(f"https://127.0.0.1:{self.port}", self.directory, certificate=certificate)
        admin.real = self

        async def answers() -> bool:
            with suppress(aiohttp.ClientError, OSError):
                status, _ = await admin.request("GET", "/api/v1/namespaces/default")
                return status == 200
            return False

        await eventually(answers, seconds=START_SECONDS_MAX)
        await _serve_endpoint_slices(admin)
        await admin.prepare()
        return admin

    def _start(self, program: str, *arguments: str) -> None:
        log = (self.directory / f"{program}.log").open("ab")
        with log:
            self._processes.append(subprocess.Popen([self._programs / program, *arguments], stdout=log, stderr=log))


async def _serve_endpoint_slices(admin: ClusterAdmin) -> None:
    """See RealCluster._extra."""
    status, _ = await admin.request("GET", "/apis/discovery.k8s.io/v1")
    if status == 200:
        return
    names = {"plural": "endpointslices", "singular": "endpointslice", "kind": "EndpointSlice", "listKind": "EndpointSliceList"}  # fmt: skip
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "endpointslices.discovery.k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, stands in for v1 in tests"},
        },
        "spec": {
            "group": "discovery.k8s.io", "scope": "Namespaced", "names": names,
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }  # fmt: skip
    await admin.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)

    async def served() -> bool:
        return (await admin.request("GET", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"))[0] == 200

    await eventually(served, seconds=START_SECONDS_MAX)


def endpoint(name: str, address: str, uid: str = "", **conditions: bool) -> dict[str, Any]:
    reference = {"kind": "Pod", "name": name, "namespace": NAMESPACE, "uid": uid or f"uid-of-{name}"}
    return {"addresses": [address], "conditions": conditions or {"ready": True}, "targetRef": reference}


def endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    family: str = "IPv4",
    ports: dict[str, int] | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    named = {"http": 8000, "kv-events": 5557} if ports is None else ports
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "engine", **(labels or {})}},
        "addressType": family, "endpoints": list(endpoints),
        "ports": [{"name": port, "port": number, "protocol": "TCP"} for port, number in named.items()],
    }  # fmt: skip
