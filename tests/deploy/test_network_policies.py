"""Who reaches whom, by the rules of NetworkPolicy: a connection needs an egress rule of its source and an ingress rule of its
target, where policies select them. The list below is the whole truth: what is not in it must be refused."""

import itertools
import re
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency

from tests.support.compose import ROOT
from tests.support.manifests import (
    NAMESPACE,
    OVERLAYS,
    Object,
    Pod,
    by_name,
    console_pod,
    overlaid,
    pods,
    rendered,
    selects,
    with_console,
)

CLIENTS = ("scheduler", "ingress", "worker", "rebalancer", "scaler", "recorder", "tools")
SCRAPED = ("scheduler", "ingress", "worker", "rebalancer", "scaler", "recorder")
PROTOCOL = "TCP"


@dataclass(frozen=True)
class Peer:
    name: str
    namespace: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[tuple[str, int], ...] = ()
    address: str = ""
    """Of what is no pod."""

    @property
    def is_ours(self) -> bool:
        return self.namespace == NAMESPACE


OUTSIDE = (
    Peer("stranger", "default", (("app", "x"),)),
    Peer("squatter", NAMESPACE, (("app", "x"),)),
    Peer("prometheus", "monitoring", (("app.kubernetes.io/name", "prometheus"),)),
    Peer("keda", "keda", (("app", "keda-operator"),)),
    Peer("router", "routers", (("app", "router"),)),
    Peer("dns", "kube-system", (("k8s-app", "kube-dns"),)),
    Peer("internet", address="93.184.216.34"),
    Peer("intranet", address="10.20.30.40"),
)
ENGINE_PORTS = (("http", 8000), ("kv-events", 5557), ("kv-replay", 5567))
OWN_ENGINES = tuple(
    Peer(name, NAMESPACE, (("app", "own"), ("pointsman.io/pool", "default")), ENGINE_PORTS) for name in ("own", "own-2")
)
"""Engines that are in no manifest of ours: they have the label alone."""
PORTS = (53, 443, 4222, 5557, 5558, 5567, 5576, 5577, 6222, 6443, 8000, 8080, 8081, 8222, 8443, 16443)
API_SERVER_PORTS = (443, 6443, 8443, 16443)
"""After the translation of its Service's address: of most, of minikube, of MicroK8s."""


def allowed(overlay: str) -> set[tuple[str, str, int]]:
    own = [engine.name for engine in OWN_ENGINES]
    engines = {"single": ["engine"], "ha": [], "gpu-vllm": ["vllm"]}[overlay] + own
    everybody = [peer.name for peer in OUTSIDE] + [pod.name.removeprefix("pointsman-") for pod in pods(overlay)]
    reached = {(client, "nats", 4222) for client in CLIENTS} | {("nats", "nats", 6222)}
    for engine in engines:
        reached |= {("ingress", engine, 8000)}
        reached |= {("worker", engine, port) for port in (8000, 5557, 5558, 5567, 5576)}
    reached |= {
        (anybody, "ingress", 8080)
        for anybody in ("stranger", "squatter", "prometheus", "keda", "router", "dns", "internet", "intranet")
    }
    reached |= {("prometheus", name, 8081 if name == "ingress" else 8080) for name in SCRAPED}
    ours = [name for name in everybody if name not in {peer.name for peer in OUTSIDE}]
    reached |= {(name, "dns", 53) for name in (*ours, *own)}
    for name in ("worker", "credentials"):
        reached |= {(name, outside, port) for outside in ("internet", "intranet") for port in API_SERVER_PORTS}
    if overlay == "gpu-vllm":
        reached |= {("keda", "scaler", 8080), ("vllm", "internet", 443)}
    return reached


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_those_who_must_reach_each_other_do_and_nobody_else(overlay: str) -> None:
    policies = list(by_name(rendered(overlay), "NetworkPolicy").values())
    ours = [peer_of(pod) for pod in pods(overlay)]
    assert all(selects({"app.kubernetes.io/part-of": "pointsman"}, dict(peer.labels)) for peer in ours)

    found = connections(policies, [*ours, *OWN_ENGINES], PORTS)

    expected = allowed(overlay)
    assert found - expected == set()
    assert expected - found == set()


def test_the_documented_policies_let_own_engines_download_and_transfer_and_routers_ask_and_nothing_else() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    documented = {found["metadata"]["name"]: found for found in blocks if found["kind"] == "NetworkPolicy"}
    shipped = list(by_name(rendered("ha"), "NetworkPolicy").values())
    peers = [*(peer_of(pod) for pod in pods("ha")), *OWN_ENGINES]
    ports = (*PORTS, 5600, 5601, 32_768, 45_000)
    before = connections(shipped, peers, ports)
    first, second = (engine.name for engine in OWN_ENGINES)

    gained = {name: connections([*shipped, policy], peers, ports) - before for name, policy in documented.items()}

    assert gained["engines-download"] == {(name, "internet", 443) for name in (first, second)}
    assert gained["routers-ask"] == {("router", "ingress", 8081)}
    assert gained["engines-transfer"] == {
        (source, target, port)
        for source, target in itertools.product((first, second), repeat=2)
        for port in (5600, 5601, 32_768, 45_000)
    }


def test_cilium_is_told_of_the_same_pods() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (cilium,) = (block for block in blocks if block["kind"] == "CiliumNetworkPolicy")
    shipped = by_name(rendered("ha"), "NetworkPolicy")["pointsman-to-api-server"]

    assert cilium["spec"]["endpointSelector"] == shipped["spec"]["podSelector"]
    assert cilium["spec"]["egress"] == [{"toEntities": ["kube-apiserver"]}]


def test_the_scaler_that_starts_pods_reaches_the_api_server_and_nothing_else_is_gained() -> None:
    with_provider = overlaid(
        {"resources": ["../single"], "components": ["../../components/kubernetes-provider"], "namespace": NAMESPACE}
    )
    before, after = (
        connections(list(by_name(objects, "NetworkPolicy").values()), [peer_of(pod) for pod in pods("single")], PORTS)
        for objects in (rendered("single"), with_provider)
    )

    assert after - before == {
        ("scaler", outside, port) for outside in ("internet", "intranet") for port in API_SERVER_PORTS
    }


def connections(policies: list[Object], ours: list[Peer], ports: tuple[int, ...]) -> set[tuple[str, str, int]]:
    """From, to or between ours."""
    return {
        (source.name, target.name, port)
        for source, target in itertools.product([*ours, *OUTSIDE], repeat=2)
        if source in ours or target in ours
        for port in ports
        if reaches(policies, source, target, port)
    }


def test_nobody_reaches_the_console_which_reaches_nats_alone() -> None:
    policies = list(by_name(with_console(), "NetworkPolicy").values())
    console = peer_of(console_pod())
    others = [*(peer_of(pod) for pod in pods("single")), *OUTSIDE]

    assert {
        (other.name, port) for other in others for port in PORTS if reaches(policies, other, console, port)
    } == set()
    assert {(other.name, port) for other in others for port in PORTS if reaches(policies, console, other, port)} == {
        ("nats", 4222),
        ("dns", 53),
    }


def test_prometheus_looks_for_no_console() -> None:
    services = by_name(with_console(), "Service").values()
    targets = {port["targetPort"] for service in services for port in service["spec"]["ports"] if is_behind(service)}

    assert targets
    assert targets.isdisjoint(console_pod().ports)


def is_behind(service: Object) -> bool:
    return selects(service["spec"]["selector"], console_pod().labels)


def peer_of(pod: Pod) -> Peer:
    name = pod.name.removeprefix("pointsman-")
    return Peer(name, NAMESPACE, tuple(pod.labels.items()), tuple(pod.ports.items()))


def reaches(policies: list[Object], source: Peer, target: Peer, port: int) -> bool:
    return permits(policies, "Egress", source, target, target, port) and permits(
        policies, "Ingress", target, source, target, port
    )


def permits(policies: list[Object], direction: str, own: Peer, other: Peer, target: Peer, port: int) -> bool:
    selecting = [
        policy["spec"]
        for policy in policies
        if own.is_ours
        and selects(policy["spec"]["podSelector"], dict(own.labels))
        and direction in policy["spec"]["policyTypes"]
    ]
    side = {"Egress": "to", "Ingress": "from"}[direction]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    return not selecting or any(
        (side not in rule or any(is_peer(found, other) for found in rule[side]))
        and ("ports" not in rule or any(is_port(found, target, port) for found in rule["ports"]))
        for rule in rules
    )


def is_peer(found: Object, peer: Peer) -> bool:
    if "ipBlock" in found:
        if not peer.address:
            return False  # pods are selected by labels; ours have no rule for their addresses
        block, address = found["ipBlock"], ip_address(peer.address)
        inside = address in ip_network(block["cidr"])
        return inside and not any(address in ip_network(hole) for hole in block.get("except", []))
    namespace = found.get("namespaceSelector")
    here = peer.is_ours if namespace is None else selects(namespace, {"kubernetes.io/metadata.name": peer.namespace})
    return not peer.address and here and selects(found.get("podSelector", {}), dict(peer.labels))


def is_port(found: dict[str, Any], target: Peer, port: int) -> bool:
    if found["protocol"] != PROTOCOL:
        return False
    wanted = dict(target.ports).get(found["port"]) if isinstance(found["port"], str) else found["port"]
    return wanted is not None and wanted <= port <= found.get("endPort", wanted)
