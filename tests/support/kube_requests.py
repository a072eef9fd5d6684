"""What requests to an API server of Kubernetes mean, and small pieces of its answers."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Json = dict[str, Any]

MERGE_PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass(frozen=True)
class Kind:
    group: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def full_name(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


KINDS = [
    Kind("", "namespaces", "Namespace", namespaced=False),
    Kind("", "pods", "Pod"),
    Kind("", "services", "Service"),
    Kind("", "serviceaccounts", "ServiceAccount"),
    Kind("apps", "deployments", "Deployment"),
    Kind("apps", "statefulsets", "StatefulSet"),
    Kind("discovery.k8s.io", "endpointslices", "EndpointSlice"),
    Kind("rbac.authorization.k8s.io", "roles", "Role"),
    Kind("rbac.authorization.k8s.io", "rolebindings", "RoleBinding"),
]
SCALED = ("deployments", "statefulsets")


class RefusedError(Exception):
    def __init__(self, code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers or {}
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


@dataclass
class Request:
    """What the path and query of a request mean."""

    verb: str
    kind: Kind
    namespace: str
    name: str
    part: str
    query: dict[str, str]
    at: float
    """Seconds of the loop's clock."""


def discovery(path: str) -> Json | None:
    """What kubectl asks first; None of other paths."""
    groups = sorted({kind.group for kind in KINDS if kind.group})
    described = {
        group: {
            "name": group,
            "versions": [{"groupVersion": f"{group}/v1", "version": "v1"}],
            "preferredVersion": {"groupVersion": f"{group}/v1", "version": "v1"},
        }
        for group in groups
    }
    match path.split("/"):
        case ["version"]:
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0", "platform": "linux/amd64"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(described.values())}
        case ["api", "v1"]:
            return _resources("")
        case ["apis", group, "v1"] if group in described:
            return _resources(group)
    return None


def _resources(group: str) -> Json:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    found: list[Json] = []
    for kind in KINDS:
        if kind.group == group:
            singular = kind.kind.lower()
            own = {
                "name": kind.plural,
                "singularName": singular,
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": verbs,
            }
            found.append(own)
        if kind.group == group and kind.plural in SCALED:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
            found.append({"name": f"{kind.plural}/scale", "singularName": "", "namespaced": True, **scale})
    version = f"{group}/v1" if group else "v1"
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def parsed_request(request: web.Request) -> Request:
    parts = request.path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    kinds = [kind for kind in KINDS if rest and kind.group == group and kind.plural == rest[0]]
    if not kinds:
        raise RefusedError(404, "NotFound", "the server could not find the requested resource")
    name, part = [*rest[1:], "", ""][:2]
    query = dict(request.query)
    watching = query.get("watch") in ("true", "True", "1")
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    reading = "get" if name else "watch" if watching else "list"
    return Request(
        verbs.get(request.method, reading), kinds[0], namespace, name, part, query, asyncio.get_running_loop().time()
    )


def kind_of(plural: str) -> Kind:
    return next(kind for kind in KINDS if kind.plural == plural)


def allows(rule: Json, request: Request, resource: str) -> bool:
    names = rule.get("resourceNames")
    return (
        request.kind.group in rule.get("apiGroups", [])
        and resource in rule.get("resources", [])
        and request.verb in rule["verbs"]
        and (not names or request.name in names)
    )


def selected(request: Request, item: Json) -> bool:
    if request.namespace and item["metadata"].get("namespace") != request.namespace:
        return False
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, request.query.get("labelSelector", "").split(",")):
        key, equals, value = term.replace("==", "=").partition("=")
        if (equals and labels.get(key) != value) or key not in labels:
            return False
    return True


def check_patch(content_type: str) -> None:
    if content_type not in MERGE_PATCHES:
        message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(MERGE_PATCHES)}"
        raise RefusedError(415, "UnsupportedMediaType", message)


def merged(into: Any, patch: Any) -> Any:
    if not isinstance(into, dict) or not isinstance(patch, dict):
        return patch
    kept = {key: value for key, value in into.items() if patch.get(key, ...) is not None}
    return kept | {key: merged(into.get(key), value) for key, value in patch.items() if value is not None}


def scale_of(workload: Json) -> Json:
    metadata = {
        key: workload["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    selector = ",".join(f"{key}={value}" for key, value in sorted(workload["spec"]["selector"]["matchLabels"].items()))
    status = {"replicas": workload.get("status", {}).get("replicas", 0), "selector": selector}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": {"replicas": workload["spec"]["replicas"]}, "status": status}  # fmt: skip


def event_line(event: str, body: Json) -> bytes:
    return json.dumps({"type": event, "object": body}).encode() + b"\n"
