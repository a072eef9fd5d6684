"""Engines from EndpointSlices, against our API server and, where there is one, a real kube-apiserver."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency

from pointsman.adapters import kubernetes_api
from pointsman.adapters.discovery.kubernetes import KubernetesDiscovery, engines_of
from pointsman.adapters.discovery.kubernetes_watch import Pace
from pointsman.adapters.discovery.targets import TARGETS_MAX
from pointsman.ports import EngineTarget
from pointsman.primitives import WallSeconds
from tests.support.discovered import Discovered, discovered
from tests.support.kube_api import KubeApi
from tests.support.kube_cluster import (
    DISCOVERY_RULES,
    NEEDS_CLIENT,
    SLICES,
    ClusterAdmin,
    endpoint,
    endpoint_slice,
)
from tests.support.kube_requests import RefusedError
from tests.support.waiting import eventually

pytestmark = NEEDS_CLIENT

ROOT = Path(__file__).parents[2]
QUICK = Pace(watch=2.0, well=0.2, first_retry=WallSeconds(0.02), longest_retry=WallSeconds(0.1))
IMPATIENT = replace(QUICK, grace=0.5, open=0.5)
"""With a server that hangs. Elsewhere a machine that stands still for so long would cost a list."""


def following(selector: str = "app=engine", pace: Pace = QUICK) -> AbstractAsyncContextManager[Discovered]:
    return discovered(KubernetesDiscovery(selector, pace=pace))


@asynccontextmanager
async def following_one(admin: ClusterAdmin, pace: Pace = QUICK) -> AsyncIterator[Discovered]:
    """`engine-0` of the slice `a`, which is seen."""
    await admin.put(SLICES, endpoint_slice("a", endpoint("engine-0", "10.0.0.1")))
    async with following(pace=pace) as engines:
        await engines.until("engine-0")
        yield engines


@pytest_asyncio.fixture
async def admin(cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch) -> ClusterAdmin:
    token = await cluster.account("worker", DISCOVERY_RULES)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(token)))
    return cluster


@pytest_asyncio.fixture
async def any_admin(any_cluster: ClusterAdmin, monkeypatch: pytest.MonkeyPatch) -> ClusterAdmin:
    token = await any_cluster.account("worker", DISCOVERY_RULES)
    monkeypatch.setenv("KUBECONFIG", str(any_cluster.kubeconfig(token)))
    return any_cluster


@pytest.fixture
def api(admin: ClusterAdmin) -> KubeApi:
    assert admin.ours
    return admin.ours


async def test_engines_come_change_and_go(any_admin: ClusterAdmin) -> None:
    await any_admin.put(
        SLICES, endpoint_slice("engine-a", endpoint("engine-0", "10.0.0.1"), endpoint("engine-1", "10.0.0.2"))
    )
    async with following() as engines:
        await engines.until("engine-0", "engine-1")
        first = engines["engine-0"]
        starting = endpoint("engine-1", "10.0.0.2", ready=False, serving=False, terminating=False)
        await any_admin.put(SLICES, endpoint_slice("engine-a", endpoint("engine-0", "10.0.0.1"), starting))
        await eventually(lambda: not engines["engine-1"].ready)
        replaced = endpoint("engine-0", "10.0.0.9", uid="another")
        await any_admin.put(SLICES, endpoint_slice("engine-a", replaced, starting))
        await eventually(lambda: engines["engine-0"].identity == "another")
        await any_admin.put(SLICES, endpoint_slice("other", endpoint("stranger", "10.0.1.1"), labels={"app": "web"}))
        await any_admin.put(SLICES, endpoint_slice("engine-b", endpoint("engine-2", "10.0.0.3")))
        await engines.until("engine-0", "engine-1", "engine-2")
        await any_admin.delete(f"{SLICES}/engine-a")
        await engines.until("engine-2")
        await any_admin.delete(f"{SLICES}/engine-b")
        await engines.until()

    assert first.url == "http://10.0.0.1:8000"
    assert first.kv_endpoint == "tcp://10.0.0.1:5557"
    assert first.identity == "uid-of-engine-0"


async def test_bookmarks_carry_a_quiet_watch_past_what_the_server_forgets(admin: ClusterAdmin, api: KubeApi) -> None:
    api.bookmark_seconds = 0.1
    async with following_one(admin) as engines:
        for _ in range(3):
            await admin.put(SLICES, endpoint_slice("other", labels={"app": "web"}))
        await asyncio.sleep(0.3)
        api.forget()
        watches = api.count("watch")
        await eventually(lambda: api.count("watch") >= watches + 2)
        await admin.put(SLICES, endpoint_slice("b", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-0", "engine-1")

    assert api.count("list") == 1


@pytest.mark.parametrize("as_status", [False, True], ids=["in the stream", "as a status"])
async def test_a_forgotten_version_is_listed_anew(admin: ClusterAdmin, api: KubeApi, as_status: bool) -> None:
    api.faults.gone_as_status = as_status
    await admin.put(SLICES, endpoint_slice("a", endpoint("engine-0", "10.0.0.1")))
    await admin.put(SLICES, endpoint_slice("b", endpoint("engine-1", "10.0.0.2")))
    async with following() as engines:
        await engines.until("engine-0", "engine-1")
        await api.stop()
        await eventually(lambda: bool(engines.discovery.problem))
        await changes_unseen(api)
        api.forget()
        await api.start()
        await engines.until("engine-1", "engine-2")
        problem = engines.discovery.problem

    assert api.count("list") == 2
    assert problem == ""


async def changes_unseen(api: KubeApi) -> None:
    """While nobody watches: engine-0 goes, engine-2 comes."""
    kind, namespace, _ = next(key for key in api.objects if key[2] == "a")
    await api.remove((kind, namespace, "a"))
    await api.write((kind, namespace, "c"), endpoint_slice("c", endpoint("engine-2", "10.0.0.3")))


async def test_while_the_server_is_away_the_last_list_stays(any_admin: ClusterAdmin) -> None:
    async with following_one(any_admin) as engines:
        await any_admin.stop()
        await eventually(lambda: bool(engines.discovery.problem))
        await asyncio.sleep(0.5)
        lists = len(engines.lists)
        await any_admin.start()
        await eventually(lambda: not engines.discovery.problem)
        await any_admin.put(SLICES, endpoint_slice("b", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-0", "engine-1")

    assert lists == 1
    assert len(engines.lists) == 2


async def test_a_server_that_is_away_from_the_start_is_waited_for(admin: ClusterAdmin, api: KubeApi) -> None:
    await api.stop()
    async with following() as engines:
        await eventually(lambda: bool(engines.discovery.problem))
        await api.start()
        await engines.until()

    assert engines.lists == [[]]


@pytest.mark.parametrize(
    "refusal",
    [
        RefusedError(403, "Forbidden", "endpointslices is forbidden"),
        RefusedError(401, "Unauthorized", "Unauthorized"),
        RefusedError(429, "TooManyRequests", "too many", {"Retry-After": "1"}),
        RefusedError(500, "InternalError", "etcdserver: leader changed"),
    ],
    ids=lambda refusal: str(refusal.code),
)
async def test_a_refusal_is_told_and_asked_again(admin: ClusterAdmin, api: KubeApi, refusal: RefusedError) -> None:
    async with following_one(admin) as engines:
        api.faults.refusals = {"list": refusal, "watch": refusal}
        await eventually(lambda: str(refusal.code) in engines.discovery.problem)
        asked = len(api.seen)
        await eventually(lambda: len(api.seen) > asked + 1)
        gap = api.seen[-1].at - api.seen[-2].at
        api.faults.refusals = {}
        await admin.put(SLICES, endpoint_slice("a", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-1")

    assert [len(targets) for targets in engines.lists] == [1, 1]
    assert gap >= float(refusal.headers.get("Retry-After", 0))
    assert engines.discovery.problem == ""


async def test_a_worker_without_its_role_is_told_what_it_may_not(
    any_admin: ClusterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await any_admin.account("poor", [{**DISCOVERY_RULES[0], "verbs": ["watch"]}])
    monkeypatch.setenv("KUBECONFIG", str(any_admin.kubeconfig(token)))
    async with following() as engines:
        await eventually(lambda: "cannot list resource" in engines.discovery.problem)

    assert engines.lists == []


async def test_credentials_of_a_kubeconfig_are_read_again(
    admin: ClusterAdmin, api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of plug-ins and of people expire within hours."""
    monkeypatch.setattr(kubernetes_api, "FRESH_WALL_SECONDS", 0.1)
    other = await admin.account("other", DISCOVERY_RULES)
    async with following() as engines:
        await engines.until()
        api.users = {token: user for token, user in api.users.items() if token == other}
        await eventually(lambda: "Unauthorized" in engines.discovery.problem)
        _cut_kubeconfig()
        await eventually(lambda: os.environ["KUBECONFIG"] in engines.discovery.problem)
        _replace_kubeconfig(admin.kubeconfig(other))
        await admin.put(SLICES, endpoint_slice("a", endpoint("engine-0", "10.0.0.1")))
        await engines.until("engine-0")

    assert engines.discovery.problem == ""


async def test_a_credential_plugin_that_hangs_is_told_and_has_no_second_beside_it(
    admin: ClusterAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "LOAD_WALL_SECONDS", 0.1)
    script = f"echo >>{tmp_path}/begun; until test -e {tmp_path}/go; do sleep 0.05; done"
    monkeypatch.setenv("KUBECONFIG", str(_with_plugin(script, tmp_path)))
    await admin.put(SLICES, endpoint_slice("a", endpoint("engine-0", "10.0.0.1")))
    told: list[str] = []
    async with following() as engines:
        monkeypatch.setattr(engines.discovery._watch, "_on_problem", told.append)  # type: ignore[attr-defined]
        await eventually(lambda: len(told) > 2)
        (tmp_path / "go").touch()
        await engines.until("engine-0")

    assert "credentials" in told[0]
    assert (tmp_path / "begun").read_text() == "\n"


def _cut_kubeconfig() -> None:
    """As it is while it is written."""
    file = Path(os.environ["KUBECONFIG"])
    file.write_text(file.read_text()[:100])


def _replace_kubeconfig(other: Path) -> None:
    other.replace(os.environ["KUBECONFIG"])


def _with_plugin(script: str, directory: Path) -> Path:
    """The kubeconfig, whose token is given by a plug-in that runs the script first."""
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    user, version = config["users"][0], "client.authentication.k8s.io/v1"
    credential = {"kind": "ExecCredential", "apiVersion": version, "status": {"token": user["user"]["token"]}}
    command = f"{script}; echo '{json.dumps(credential)}'"
    user["user"] = {"exec": {"apiVersion": version, "command": "sh", "args": ["-c", command]}}
    path = directory / "config"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_request_that_hangs_is_given_up(admin: ClusterAdmin, api: KubeApi, verb: str) -> None:
    await admin.put(SLICES, endpoint_slice("a", endpoint("engine-0", "10.0.0.1")))
    api.faults.hanging = {verb}
    async with following(pace=IMPATIENT) as engines:
        await eventually(lambda: bool(engines.discovery.problem))
        api.faults.hanging = set()
        await engines.until("engine-0")
        await eventually(lambda: not engines.discovery.problem)


async def test_a_watch_that_says_nothing_is_not_trusted(admin: ClusterAdmin, api: KubeApi) -> None:
    """A half-open connection: it neither ends nor speaks. Its changes come by a list."""
    api.faults.mute = True
    async with following_one(admin, pace=IMPATIENT) as engines:
        await eventually(lambda: api.watching == 1)
        await admin.put(SLICES, endpoint_slice("a", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-1")

    assert api.count("list") > 1


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\xff\n", b"{}\n", b'{"type":"ADDED","object":7}\n', b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n', b"[" * 100_000 + b"\n", b"x" * 9_000_000],
    ids=["bytes", "no event", "no object", "no version", "deep", "long"],
)  # fmt: skip
async def test_what_cannot_be_read_in_a_watch_is_listed(admin: ClusterAdmin, api: KubeApi, garbage: bytes) -> None:
    async with following_one(admin) as engines:
        await eventually(lambda: api.watching == 1)
        api.faults.garbage = garbage
        await admin.put(SLICES, endpoint_slice("a", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-1")

    assert api.count("list") == 2


async def test_an_event_that_breaks_off_comes_again(admin: ClusterAdmin, api: KubeApi) -> None:
    async with following_one(admin) as engines:
        await eventually(lambda: api.watching == 1)
        api.faults.cut_lines = True
        await admin.put(SLICES, endpoint_slice("a", endpoint("engine-1", "10.0.0.2")))
        await engines.until("engine-1")


async def test_a_long_list_comes_in_pages_and_starts_over_if_a_page_expires(
    admin: ClusterAdmin, api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.adapters.discovery.kubernetes_watch.PAGE_LIMIT", 2)
    for number in range(5):
        await admin.put(SLICES, endpoint_slice(f"s{number}", endpoint(f"engine-{number}", f"10.0.0.{number + 1}")))
    answer, lists = api.list_objects, 0

    def forgetful(request: Any) -> Any:
        nonlocal lists
        lists += 1
        if lists == 2:
            api.version += 1
            api.forget()
        return answer(request)

    api.list_objects = forgetful  # type: ignore[method-assign]
    async with following() as engines:
        await engines.until(*(f"engine-{number}" for number in range(5)))

    assert lists == 2 + 3


async def test_ports_ranks_and_addresses_come_from_slices(any_admin: ClusterAdmin) -> None:
    """Two slices of a dual-stack Service, one of a Service that only names KV ports, labels, and what is absurd."""
    await any_admin.put(SLICES, endpoint_slice("v6", endpoint("two", "fd00::1"), family="IPv6", ports={"http": 8000}))
    await any_admin.put(SLICES, endpoint_slice("v4", endpoint("two", "10.0.0.1"), ports={"http": 8000}))
    await any_admin.put(
        SLICES, endpoint_slice("kv", endpoint("two", "10.0.0.1"), ports={"kv-events": 7001, "kv-replay": 7002})
    )
    await any_admin.put(
        SLICES, endpoint_slice("six", endpoint("six", "fd00::6"), family="IPv6", ports={"openai": 9000, "kv-events": 1})
    )
    labels = {"pointsman.io/data-parallel-size": "2", "pointsman.io/port": "8100", "pointsman.io/role": "decode"}
    await any_admin.put(SLICES, endpoint_slice("ranks", endpoint("dp", "10.0.0.7"), labels=labels))
    await any_admin.put(
        SLICES, endpoint_slice("wrong", endpoint("wrong", "10.0.0.8"), labels={"pointsman.io/port": "99999"})
    )
    await any_admin.put(SLICES, endpoint_slice("portless", endpoint("portless", "10.0.0.8"), ports={}))
    async with following() as engines:
        await engines.until("two", "six", "dp-rank-0", "dp-rank-1")
        problem = engines.discovery.problem

    two, six, rank = engines["two"], engines["six"], engines["dp-rank-1"]
    assert (two.url, two.kv_endpoint, two.kv_replay_endpoint) == ("http://10.0.0.1:8000", "tcp://10.0.0.1:7001", "tcp://10.0.0.1:7002")  # fmt: skip
    assert (six.url, six.kv_endpoint) == ("http://[fd00::6]:9000", "tcp://[fd00::6]:1")
    assert (rank.url, rank.dp_rank, rank.kv_endpoint, rank.role) == ("http://10.0.0.7:8100", 1, "tcp://10.0.0.7:5558", "decode")  # fmt: skip
    assert rank.identity == engines["dp-rank-0"].identity == "uid-of-dp"
    assert "and 1 more" in problem


def readings(*slices: dict[str, Any]) -> dict[str, EngineTarget]:
    found, _ = engines_of({made["metadata"]["name"]: json.dumps(made).encode() for made in slices})
    return {target.instance: target for target in found}


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": True, "serving": False}, False),  # a Service that publishes pods that are not ready
        ({"ready": False, "serving": True}, True),
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
    ids=str,
)
def test_ready_is_what_serves_and_does_not_terminate(conditions: dict[str, bool], ready: bool) -> None:
    made = endpoint_slice("a", {**endpoint("e", "10.0.0.1"), "conditions": conditions})

    assert readings(made)["e"].ready is ready


def test_a_pod_in_two_slices_is_one_engine_and_a_replaced_one_has_its_own_identity() -> None:
    old = endpoint("e", "10.0.0.1", uid="old", ready=False, serving=False, terminating=True)
    new = endpoint("e", "10.0.0.2", uid="new", ready=True)

    twice = readings(endpoint_slice("a", endpoint("e", "10.0.0.1")), endpoint_slice("b", endpoint("e", "10.0.0.1")))
    replaced = [readings(endpoint_slice("a", *order))["e"].identity for order in ([old, new], [new, old])]

    assert list(twice) == ["e"]
    assert replaced == ["new", "new"]


@pytest.mark.parametrize(
    "made",
    [
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "a"}, "endpoints": None, "ports": None, "addressType": "IPv4"},
        endpoint_slice("a", {"addresses": []}, {"addresses": ["not an address"]}, {}),
        endpoint_slice("a", {"addresses": ["x y"]}, family="FQDN"),
        endpoint_slice("a", endpoint("-" * 300, "10.0.0.1")),
        endpoint_slice("a", endpoint("e", "10.0.0.1"), family="Carrier pigeon"),
        {**endpoint_slice("a"), "endpoints": [7]},
        {**endpoint_slice("a"), "endpoints": "many"},
    ],
    ids=["bare", "null", "addresses", "host", "name", "family", "endpoint", "endpoints"],
)
def test_absurd_slices_spoil_nothing_else(made: dict[str, Any]) -> None:
    assert list(readings(made, endpoint_slice("z", endpoint("good", "10.0.0.3")))) == ["good"]


def test_an_engine_outside_the_cluster_needs_no_pod() -> None:
    made = endpoint_slice("a", {"addresses": ["10.0.0.1"]}, family="IPv4")
    made["metadata"]["annotations"] = {"pointsman.io/kv-port": "6001"}
    target = readings(made)["10-0-0-1-8000"]

    assert (target.identity, target.kv_endpoint) == ("", "tcp://10.0.0.1:6001")


@pytest.mark.parametrize("text", ["", "ns/", "a\nb", "x" * 2000])
def test_a_malformed_source_is_refused(admin: ClusterAdmin, text: str) -> None:
    with pytest.raises(ValueError, match="SELECTOR"):
        KubernetesDiscovery(text)


@pytest.mark.parametrize(
    ("text", "namespace", "selector"),
    [
        ("app=engine", "", "app=engine"),
        ("gpu-1/app=engine", "gpu-1", "app=engine"),
        ("kubernetes.io/service-name=vllm", "", "kubernetes.io/service-name=vllm"),
        ("gpu/pointsman.io/pool=default", "gpu", "pointsman.io/pool=default"),
    ],
)
def test_a_namespace_is_told_from_a_prefix(admin: ClusterAdmin, text: str, namespace: str, selector: str) -> None:
    discovery = KubernetesDiscovery(text)

    assert (discovery._namespace, discovery._selector) == (namespace, selector)


async def test_no_cluster_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))

    with pytest.raises(ValueError, match="no cluster is known"):
        KubernetesDiscovery("app=engine")


def test_the_documented_and_the_shipped_role_are_what_these_tests_grant() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/engines.md").read_text(), re.DOTALL)
    documented = [role for block in blocks if (role := yaml.safe_load(block)).get("kind") == "Role"]
    manifests = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/worker.yaml").read_text())
    shipped = [found for found in manifests if found["kind"] == "Role"]

    assert [role["rules"] for role in documented + shipped] == [DISCOVERY_RULES] * 2


def test_an_annotation_of_a_thousand_ranks_costs_a_bounded_time() -> None:
    pods = [endpoint(f"pod-{number:04}", f"10.0.{number // 250}.{number % 250 + 1}") for number in range(1000)]
    made = endpoint_slice("a", *pods, labels={"pointsman.io/data-parallel-size": "1024"})
    found, problem = engines_of({"a": json.dumps(made).encode()})

    assert len(found) == TARGETS_MAX
    assert "the first 1024 are followed" in problem
    assert {target.instance.partition("-rank-")[0] for target in found} == {"pod-0000"}


@pytest.mark.parametrize("is_pod", [True, False])
def test_a_wrong_label_takes_no_engine_away_that_is_known(is_pod: bool) -> None:
    """Kubernetes copies a Service's labels to the slices of all its pods."""

    def seen(
        last: list[EngineTarget], *, pods: int, ready: bool = True, **labels: str
    ) -> tuple[list[EngineTarget], str]:
        endpoints = [endpoint(f"engine-{n}", f"10.0.0.{n}", ready=ready) for n in range(1, pods + 1)]
        for each in endpoints if not is_pod else ():
            del each["targetRef"]
        made = endpoint_slice("a", *endpoints, labels={f"pointsman.io/{name}": text for name, text in labels.items()})
        return engines_of({"a": json.dumps(made).encode()}, last)

    first, _ = seen([], pods=2)
    kept, problem = seen(first, pods=3, role="prefil")
    unready, _ = seen(kept, pods=2, ready=False, role="prefil")
    fewer, _ = seen(kept, pods=1, role="prefil")
    corrected, no_problem = seen(fewer, pods=3, role="prefill")

    assert len(first) == 2
    assert kept == first, "a new one whose role is not known is not followed"
    assert "prefil is none of" in problem
    assert [(target.instance, target.ready) for target in unready] == [(t.instance, False) for t in first]
    assert fewer == first[:1]
    assert [target.role for target in corrected] == ["prefill"] * 3
    assert no_problem == ""
