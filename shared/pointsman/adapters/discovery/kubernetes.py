"""Engines from the EndpointSlices that a label selector finds in one namespace. It may list and watch EndpointSlices and
asks for nothing else (docs/decisions/0052).

- An engine is a pod: its name is the instance's, its UID the identity. Several slices, addresses or Services of one pod
  are one engine.
- Ports are found by name: `http` (or the only other port), `kv-events`, `kv-replay`. A slice's `pointsman.io/*`
  annotations win over its labels, which Kubernetes copies from the Service's, and both over port names.
- Ready is what serves and does not terminate: `serving` is the pod's own readiness, also where the Service publishes
  pods that are not ready.
- An engine whose description cannot be used any more, by a wrong label for example, stays as it was known last."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import msgspec
import structlog
from typing_extensions import override

from pointsman.adapters.discovery.kubernetes_watch import List, ListWatch, Objects, Pace
from pointsman.adapters.discovery.targets import (
    KV_PORT_KEY,
    KV_REPLAY_PORT_KEY,
    PORT_KEY,
    PREFIX,
    TARGETS_MAX,
    TargetError,
    annotated_targets,
    kept_targets,
    listing,
)
from pointsman.adapters.kubernetes_api import Cluster, ClusterError
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import InstanceId

log = structlog.get_logger()

KEYS_OF_PORTS = {"http": PORT_KEY, "kv-events": KV_PORT_KEY, "kv-replay": KV_REPLAY_PORT_KEY}
FAMILIES = ("IPv4", "IPv6", "FQDN")
SELECTOR_LENGTH_MAX = 1024


class _Meta(msgspec.Struct):
    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Reference(msgspec.Struct):
    name: str | None = None
    uid: str | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    target: _Reference | None = msgspec.field(default=None, name="targetRef")


class _Slice(msgspec.Struct):
    metadata: _Meta
    family: str = msgspec.field(default="", name="addressType")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


@dataclass(frozen=True, slots=True)
class _Sighting:
    """One endpoint of one slice."""

    order: tuple[int, str, str]
    name: str
    identity: str
    host: str
    ready: bool
    annotations: dict[str, str]


class KubernetesDiscovery(EngineDiscovery):
    def __init__(self, text: str, *, pace: Pace | None = None) -> None:
        """`text`: [NAMESPACE/]SELECTOR. Raises ValueError, also if no cluster is known."""
        self.name = f"kubernetes:{text}"
        self._namespace, self._selector = _parsed(text)
        try:
            self._cluster = Cluster()
        except ClusterError as error:
            raise ValueError(f"{self.name}: {error}") from error
        self._watch = ListWatch(self._cluster, self._operation, pace or Pace(), self._on_unreadable)
        self._unreadable = self._unusable = self.problem = ""

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        last: list[EngineTarget] | None = None
        async with aclosing(self._watch.states()) as states:
            async for slices in states:
                found, unusable = engines_of(slices, last or ())
                self._on_unusable(unusable)
                if found != last:
                    last = found
                    yield found

    def _on_unusable(self, reason: str) -> None:
        if reason and reason != self._unusable:
            log.warning("engines_unusable", source=self.name, reason=reason)
        self._unusable = reason
        self._say()

    def _on_unreadable(self, reason: str) -> None:
        self._unreadable = reason
        self._say()

    def _say(self) -> None:
        reason = self._unreadable or self._unusable
        self.problem = f"{self.name}: {reason}" if reason else ""

    def _operation(self, api: Any) -> List:
        lists = self._cluster.client.DiscoveryV1Api(api).list_namespaced_endpoint_slice
        namespace = self._namespace or self._cluster.namespace
        return lambda **options: lists(namespace, label_selector=self._selector, **options)


def engines_of(slices: Objects, last: Sequence[EngineTarget] = ()) -> tuple[list[EngineTarget], str]:
    """Targets by instance, and why something is not among them, or only as it was in `last`."""
    sightings: dict[str, list[_Sighting]] = {}
    problems: list[str] = []
    for name in sorted(slices):
        try:
            for sighting in _sightings(msgspec.json.decode(slices[name], type=_Slice)):
                sightings.setdefault(sighting.identity or sighting.name, []).append(sighting)
        except (msgspec.MsgspecError, RecursionError) as error:
            problems.append(f"{name[:100]}: {error}")
    found: dict[InstanceId, EngineTarget] = {}
    for same in sorted(sightings.values(), key=lambda same: same[0].name):
        if len(found) > TARGETS_MAX:  # ranks of all could be millions
            break
        try:
            targets = _one_engine(same)
        except TargetError as error:
            problems.append(str(error))
            targets = kept_targets(last, identity=same[0].identity, host=same[0].host, ready=_is_ready(same))
        for target in targets:
            other = found.get(target.instance)
            if other is None or (target.ready and not other.ready):  # a pod replaced under its name is seen twice
                found[target.instance] = target
    return listing(found, problems)


def _one_engine(sightings: list[_Sighting]) -> list[EngineTarget]:
    """Of one pod. What the first slice does not say, the others may. Raises TargetError."""
    ordered = sorted(sightings, key=lambda sighting: sighting.order)
    annotations: dict[str, str] = {}
    for sighting in reversed(ordered):
        annotations |= sighting.annotations
    return annotated_targets(
        annotations,
        name=ordered[0].name,
        host=ordered[0].host,
        identity=ordered[0].identity,
        ready=_is_ready(ordered),
    )


def _is_ready(sightings: list[_Sighting]) -> bool:
    return any(sighting.ready for sighting in sightings)


def _sightings(found: _Slice) -> list[_Sighting]:
    annotations = _annotations(found)
    sightings = []
    for endpoint in found.endpoints or []:
        host = _host(endpoint, found.family)
        if not host:
            continue
        pod = endpoint.target or _Reference()
        conditions = endpoint.conditions or _Conditions()
        serving = conditions.ready if conditions.serving is None else conditions.serving
        sightings.append(
            _Sighting(
                order=(FAMILIES.index(found.family), found.metadata.name, host),
                name=pod.name or f"{host}-{annotations.get(PORT_KEY, '')}",
                identity=pod.uid or "",
                host=host,
                ready=serving is not False and not conditions.terminating,
                annotations=annotations,
            )
        )
    return sightings


def _annotations(found: _Slice) -> dict[str, str]:
    ports = {port.name or "": port.port for port in found.ports or [] if port.port and port.protocol in (None, "TCP")}
    named = {key: str(ports.pop(name)) for name, key in KEYS_OF_PORTS.items() if name in ports}
    if PORT_KEY not in named and len(ports) == 1:
        named[PORT_KEY] = str(next(iter(ports.values())))
    for texts in (found.metadata.labels, found.metadata.annotations):
        named |= {key: text for key, text in (texts or {}).items() if key.startswith(PREFIX)}
    return named


def _host(endpoint: _Endpoint, family: str) -> str:
    """Empty: none that can be used. Addresses beyond the first are the same endpoint's."""
    address = (endpoint.addresses or [""])[0]
    if family == "FQDN" or family not in FAMILIES:
        return address if family == "FQDN" else ""
    try:
        return str(ip_address(address))
    except ValueError:
        return ""


def _parsed(text: str) -> tuple[str, str]:
    """Namespace, empty for the own one, and selector: a selector's keys may have a slash too."""
    before, slash, after = text.partition("/")
    is_namespace = bool(slash) and before.replace("-", "").isalnum() and before == before.lower() and "." not in before
    namespace, selector = (before, after) if is_namespace else ("", text)
    if not selector or len(selector) > SELECTOR_LENGTH_MAX or not selector.isprintable():
        raise ValueError(
            f"kubernetes:{text} is not kubernetes:[NAMESPACE/]SELECTOR, such as kubernetes:vllm/app=engine"
        )
    return namespace, selector
