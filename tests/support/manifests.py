"""deploy/kubernetes and the chart as Kubernetes gets them, rendered by kubectl and by Helm."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency
from helm_python import Chart
from typing_extensions import override

from tests.support.compose import ROOT, OwnService
from tests.support.debian_programs import debian_program

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "pointsman"
OVERLAYS = ("single", "ha", "gpu-vllm")
NAMESPACE = "pointsman"
EVERYWHERE = ("credentials", "ingress", "nats", "rebalancer", "recorder", "scaler", "scheduler", "tools", "worker")
ENGINES = {"single": ("engine",), "ha": (), "gpu-vllm": ("vllm",)}
PODS = tuple(f"{overlay}/pointsman-{name}" for overlay in OVERLAYS for name in (*EVERYWHERE, *ENGINES[overlay]))
"""All that `all_pods` finds, known without kubectl: tests are collected where there is none, and in no time."""
WORKLOADS = ("Deployment", "StatefulSet", "Job")

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """The one container of a workload's pods."""

    overlay: str
    workload: Object

    @override
    def __str__(self) -> str:
        return f"{self.overlay}/{self.name}"

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.workload["spec"]["template"]["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def command(self) -> list[str]:
        return [*self.container["command"], *self.container.get("args", [])]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def environment(self) -> dict[str, str]:
        """As the container gets it. What only the cluster knows stands as `<metadata.name>`."""
        return self.environment_in(rendered(self.overlay))

    def environment_in(self, objects: tuple[Object, ...]) -> dict[str, str]:
        maps = {name: found["data"] for name, found in by_name(objects, "ConfigMap").items()}
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            found |= maps[source["configMapRef"]["name"]] or {}
        for variable in self.container.get("env") or []:
            match variable.get("valueFrom"):
                case None:
                    found[variable["name"]] = variable["value"]
                case {"configMapKeyRef": reference}:
                    found[variable["name"]] = maps[reference["name"]][reference["key"]]
                case {"fieldRef": reference}:
                    found[variable["name"]] = f"<{reference['fieldPath']}>"
                case {"secretKeyRef": {"optional": True}}:
                    pass
                case other:
                    raise AssertionError(other)
        return found

    def own_service(self) -> OwnService | None:
        """None if it runs no service of ours."""
        script, *arguments = self.command
        if not script.startswith("pointsman-"):
            return None
        flags = dict(argument.split("=", 1) for argument in arguments)
        return OwnService(name=str(self), script=script, flags=flags, environment=self.environment())


@cache
def kubectl() -> Path:
    return debian_program("kubectl", "kubectl", "trixie")


@cache
def rendered(overlay: str) -> tuple[Object, ...]:
    command = [str(kubectl()), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    return _documents(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def overlaid(kustomization: Mapping[str, Any]) -> tuple[Object, ...]:
    """Somebody's overlay, beside ours: its paths are those that it has there."""
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory).resolve()
        moved = {
            kind: [os.path.relpath(KUBERNETES / "overlays/own" / path, there) for path in kustomization[kind]]
            for kind in ("resources", "components", "transformers")
            if kind in kustomization
        }
        (there / "kustomization.yaml").write_text(yaml.safe_dump({**kustomization, **moved}))
        command = [str(kubectl()), "kustomize", str(there)]
        return _documents(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def chart(values: Mapping[str, Any]) -> tuple[Object, ...]:
    """As Helm renders it. `values`: beside those of values.yaml. Raises HelmValuesError where its schema refuses them."""
    with Chart.load(CHART) as loaded:
        manifests = loaded.render(dict(values), name="pointsman", namespace=NAMESPACE)
    return tuple(found for path in sorted(manifests) for found in _documents(manifests[path]))


def by_name(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def pods(overlay: str) -> list[Pod]:
    return [Pod(overlay, found) for found in rendered(overlay) if found["kind"] in WORKLOADS]


def all_pods() -> list[Pod]:
    return [pod for overlay in OVERLAYS for pod in pods(overlay)]


def pod_at(place: str) -> Pod:
    """One of PODS."""
    return next(pod for pod in pods(place.partition("/")[0]) if str(pod) == place)


def with_console() -> tuple[Object, ...]:
    """The overlay `single` with the component that is in none: as the chart says it, which says what Kustomize says."""
    return chart({"console": True})


def console_pod() -> Pod:
    return Pod("single", by_name(with_console(), "Deployment")["pointsman-console"])


def matches(query: str, labels: Mapping[str, str]) -> bool:
    """Of kubectl's `-l`: `key=value`, `key!=value`, `!key`, all of which must hold."""
    for term in query.split(","):
        key, equal, value = term.partition("=")
        if key.startswith("!"):
            holds = key[1:] not in labels
        elif key.endswith("!"):
            holds = labels.get(key[:-1]) != value
        else:
            holds = bool(equal) and labels.get(key) == value
        if not holds:
            return False
    return True


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """A LabelSelector, or a Service's map."""
    exact = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    return exact.items() <= labels.items() and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def walk(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of an object with its keys; an element of a list has its list's."""
    yield path, found
    if isinstance(found, dict):
        for key, value in found.items():
            yield from walk(value, (*path, key))
    elif isinstance(found, list):
        for value in found:
            yield from walk(value, path)


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    assert expression["operator"] == "In"
    return labels.get(expression["key"]) in expression["values"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Refuses a key that is there twice; yaml itself takes the last."""

    @override
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice: {keys}"
        return super().construct_mapping(node, deep)


def _documents(text: str) -> tuple[Object, ...]:
    return tuple(document for document in yaml.load_all(text, _Loader) if document)
