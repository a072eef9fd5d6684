"""Pods of a rendered overlay as processes of this machine: their commands, environment, files and probes, each pod with an
address of its own on the loopback, so that ports are those of the manifests. What is not as in a cluster: no image, no
network policies, no limits; names of pods and Services in commands, environment and configuration become addresses."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.support.manifests import NAMESPACE, Object, Pod, by_name, pods, rendered

PROGRAMS = Path(sys.executable).parent
STOP_SECONDS_MAX = 20
LOOK_SECONDS = 0.05


@dataclass
class Running:
    pod: Pod
    name: str
    address: str
    root: Path
    """Where the pod's volumes are mounted."""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def url(self, port: str, path: str = "") -> str:
        return f"http://{self.address}:{self.pod.ports[port]}{path}"


class PodProcesses:
    """`secrets`: values by key and name of the Secret, as the Job makes them."""

    def __init__(self, overlay: str, directory: Path) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.accounts: dict[str, dict[str, str]] = {}
        """Environment by pod that stands for the files of its service account."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._maps = {name: found["data"] for name, found in by_name(rendered(overlay), "ConfigMap").items()}
        block = f"127.{random.SystemRandom().randrange(2, 250)}.{random.SystemRandom().randrange(250)}"
        self.running = [
            Running(pod, name, f"{block}.{number}", directory / name)
            for number, (pod, name) in enumerate(_instances(overlay), start=10)
        ]
        self._hosts = self._addresses(by_name(rendered(overlay), "Service"))

    def of(self, component: str) -> list[Running]:
        return [running for running in self.running if running.pod.name == f"pointsman-{component}"]

    def start(self, running: Running, *, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        """`command`: instead of the container's, as `kubectl exec` or a hook runs it."""
        if not running.root.exists():
            self._mount(running)
        running.environment = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "TMPDIR": str(running.root / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.accounts.get(running.pod.name, {}),
            **{name: self._here(value, running) for name, value in running.pod.environment().items()},
        }
        arguments = [self._here(argument, running) for argument in command or running.pod.command]
        with (running.root / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(PROGRAMS / "python") if arguments[0].startswith("python") else arguments[0], *arguments[1:]],
                cwd=running.root, env=running.environment, stdout=log, stderr=log,
            )  # fmt: skip
        self._started.append(process)
        if command is None:
            running.process = process
        return process

    def answers(self, running: Running, kind: str) -> bool:
        """One probe of the container, as the kubelet does it."""
        probe = running.pod.container[f"{kind}Probe"]["httpGet"]
        try:
            with urlopen(running.url(probe["port"], probe["path"]), timeout=2) as answer:
                return bool(answer.status < 400)
        except OSError:
            return False

    def wait_ready(self, *waiting: Running, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        left = list(waiting)
        while left := [
            r for r in left if not all(self.answers(r, kind) for kind in ("startup", "liveness", "readiness"))
        ]:
            for running in left:
                assert running.process is not None
                assert running.process.poll() is None, f"{running.name} ended:\n{running.log[-3000:]}"
            assert time.monotonic() < deadline, "\n".join(f"{r.name} is not ready:\n{r.log[-1500:]}" for r in left)
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        alive = [process for process in self._started if process.poll() is None]
        for process in alive:
            process.kill()
        for process in alive:
            process.wait(STOP_SECONDS_MAX)

    def _mount(self, running: Running) -> None:
        running.root.mkdir(parents=True)
        volumes = {volume["name"]: volume for volume in running.pod.spec.get("volumes", [])}
        for mount in sorted(running.pod.container.get("volumeMounts", []), key=lambda one: str(one["mountPath"])):
            there = running.root / mount["mountPath"].lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            for name, text in self._files(volumes.get(mount["name"], {})):
                (there / name).write_text(self._here(text, running) if name.endswith(".conf") else text)

    def _files(self, volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Of a volume; a claim and an emptyDir have none."""
        if "configMap" in volume:
            yield from self._maps[volume["configMap"]["name"]].items()
        if "secret" in volume:
            yield from self.secrets[volume["secret"]["secretName"]].items()
        for source in volume.get("projected", {}).get("sources", []):
            yield from self.secrets[source["secret"]["name"]].items()

    def _here(self, text: str, running: Running) -> str:
        """A text of the manifests with this machine's paths and addresses."""
        text = text.replace("<metadata.name>", running.name).replace("<metadata.namespace>", NAMESPACE)
        for path in sorted((mount["mountPath"] for mount in running.pod.container["volumeMounts"]), reverse=True):
            text = re.sub(rf"(?<![\w.]){re.escape(path)}(?=[/\"]|$)", f"{running.root}{path}", text)
        for host, address in self._hosts.items():
            text = re.sub(rf"(?<=[/@]){re.escape(host)}(?=[:/])", address, text)
        return text.replace("0.0.0.0", running.address).replace("127.0.0.1", running.address)

    def _addresses(self, services: Mapping[str, Object]) -> dict[str, str]:
        """Longest names first."""
        hosts: dict[str, str] = {}
        for name, service in services.items():
            behind = [r for r in self.running if service["spec"]["selector"].items() <= r.pod.labels.items()]
            for running in behind:
                hosts[f"{running.name}.{name}"] = running.address
                hosts.setdefault(name, running.address)
        return dict(sorted(hosts.items(), key=lambda entry: -len(entry[0])))


def _instances(overlay: str) -> Iterator[tuple[Pod, str]]:
    for pod in pods(overlay):
        ordinal = pod.workload["kind"] == "StatefulSet"
        for number in range(pod.workload["spec"].get("replicas", 1)):
            yield pod, f"{pod.name}-{number}" if ordinal else f"{pod.name}-7d4b9c6f5-{number}zx9k"
