"""Every pod of the overlay `single` as a process, with the environment, files, service account and probes that its manifest
gives it; and what the fleet of them does."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from pointsman.runtime.bus_users import Credentials
from tests.support.manifests import Object, by_name, rendered
from tests.support.pod_processes import PodProcesses, Running
from tests.support.rbac_api import RbacApi

pytestmark = pytest.mark.timeout(300)

START_SECONDS_MAX = 120.0
COMMAND_SECONDS_MAX = 60.0
SEEN_SECONDS_MAX = 40.0
LONG_TOKENS = 300
PROMPT = "a long prompt " * 200


@dataclass
class Deployed:
    pods: PodProcesses
    api: RbacApi
    ready_seconds: float

    def one(self, component: str) -> Running:
        (running,) = self.pods.of(component)
        return running


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    directory = tmp_path_factory.mktemp("single")
    began = time.monotonic()
    api = RbacApi(directory, by_name(rendered("single"), "Role"))
    pods = PodProcesses("single", directory / "pods")
    job, (nats,) = pods.of("credentials")[0], pods.of("nats")
    with api.serving():
        try:
            pods.accounts = {
                job.pod.name: api.in_pod("pointsman-credentials"),
                "pointsman-worker": api.kubeconfig("pointsman-worker"),
            }
            run(pods, job)
            pods.secrets = api.secrets
            api.put_slice(slice_of(pods.of("engine")))
            pods.start(nats)
            pods.wait_ready(nats, seconds=START_SECONDS_MAX)
            serving = [r for r in pods.running if r.pod.name not in (job.pod.name, nats.pod.name, "pointsman-tools")]
            for running in serving:
                pods.start(running)
            pods.wait_ready(*serving, seconds=START_SECONDS_MAX)
            yield Deployed(pods, api, time.monotonic() - began)
        finally:
            pods.stop()


def test_all_pods_answer_their_probes_and_the_worker_follows_both_engines(deployed: Deployed) -> None:
    names = {running.name for running in deployed.pods.of("engine")}

    assert len(names) == 2
    assert until(lambda: serving(deployed), lambda found: len(found) == 2) == names


def test_a_client_gets_an_answer_and_the_second_time_from_the_cache(deployed: Deployed) -> None:
    (_, first), (_, second) = ask(deployed), ask(deployed)

    assert first["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_scaler_says_the_decided_size_to_autoscalers(deployed: Deployed) -> None:
    page = until(lambda: json.loads(get(deployed.one("scaler").url("admin", "/desired"))), lambda found: bool(found))
    command(deployed, "pointsman", "scale", "3", "--from", "nats://pointsman-nats:4222")
    asked = until(
        lambda: json.loads(get(deployed.one("scaler").url("admin", "/desired"))),
        lambda found: (found["desired"], found["ready"]) == (3, 2),
    )

    assert set(page) == {"pool", "desired", "ready", "number", "reason"}
    assert page["pool"] == asked["pool"] == "default"


def test_the_job_has_the_rights_it_needs_changes_nothing_that_is_there_and_replaces_what_was_deleted(
    deployed: Deployed,
) -> None:
    api, job = deployed.api, deployed.one("credentials")
    before = {name: dict(found) for name, found in api.secrets.items()}
    run(deployed.pods, job)
    again = {name: dict(found) for name, found in api.secrets.items()}
    del api.secrets["pointsman-nats-scaler"]
    run(deployed.pods, job)

    assert again == before
    assert {name for name, found in api.secrets.items() if found != before[name]} == {
        "pointsman-nats-scaler",
        "pointsman-nats-users",
    }
    assert {(verb, what) for account, verb, what in api.seen if account == "pointsman-credentials"} == {
        ("get", "secrets"),
        ("create", "secrets"),
        ("update", "secrets"),
    }
    asked = {(verb, what) for account, verb, what in api.seen if account == "pointsman-worker"}
    assert asked == {("list", "endpointslices"), ("watch", "endpointslices")}


def test_the_job_writes_an_admin_down_for_as_long_as_somebody_keeps_its_secret(
    deployed: Deployed, tmp_path: Path
) -> None:
    api, job = deployed.api, deployed.one("credentials")
    Credentials(tmp_path).make(admins=["root"])
    without = dict(api.secrets["pointsman-nats-users"])
    api.secrets["pointsman-nats-admin"] = {"admin.nk": (tmp_path / "admins/root.nk").read_text()}
    run(deployed.pods, job)
    users = api.secrets["pointsman-nats-users"]["nats-users.conf"]
    del api.secrets["pointsman-nats-admin"]
    run(deployed.pods, job)

    (key,) = re.findall(r"# admin root\n.*nkey: (\w+)", (tmp_path / "nats-users.conf").read_text())
    assert key in users
    assert key not in without["nats-users.conf"]
    assert api.secrets["pointsman-nats-users"] == without


def test_an_engine_that_terminates_gets_nothing_new_finishes_what_it_has_and_only_then_may_stop(
    deployed: Deployed,
) -> None:
    going, staying = deployed.pods.of("engine")
    hook = going.pod.container["lifecycle"]["preStop"]["exec"]["command"]
    answered: list[Any] = []
    url = going.url("http", "/v1/chat/completions")
    stream = threading.Thread(target=lambda: answered.append(chat(url, PROMPT, max_tokens=LONG_TOKENS)[1]))
    stream.start()
    until(lambda: requests_in(going), lambda found: found > 0)

    deployed.api.put_slice(slice_of([going, staying], terminating=going.name))
    pre_stop = deployed.pods.start(going, command=hook)
    until(lambda: ready_engines(deployed), lambda found: found == 1)  # sooner than `pointsman fleet` would say so
    waited = pre_stop.poll() is None and requests_in(going) > 0
    served_by = {ask(deployed, f"{number} {PROMPT}")[0] for number in range(4)}
    stream.join()
    code = pre_stop.wait(COMMAND_SECONDS_MAX)
    deployed.api.put_slice(slice_of([going, staying]))
    until(lambda: serving(deployed), lambda found: found == {going.name, staying.name})

    assert waited
    assert served_by == {staying.name}
    assert answered[0]["usage"]["completion_tokens"] == LONG_TOKENS
    assert code == 0


def slice_of(engines: list[Running], *, terminating: str = "") -> Object:
    """As Kubernetes' controller makes it of the Service and its pods."""
    service = by_name(rendered("single"), "Service")["pointsman-engines"]
    name = service["metadata"]["name"]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-x7k2p",
            "namespace": "pointsman",
            "labels": {**service["metadata"]["labels"], "kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [engine.address],
                "conditions": {"ready": True, "serving": True, "terminating": engine.name == terminating},
                "targetRef": {
                    "kind": "Pod",
                    "name": engine.name,
                    "namespace": "pointsman",
                    "uid": f"uid-{engine.name}",
                },
            }
            for engine in engines
        ],
        "ports": [
            {"name": port["name"], "port": engines[0].pod.ports[port["targetPort"]], "protocol": "TCP"}
            for port in service["spec"]["ports"]
        ],
    }


def run(pods: PodProcesses, job: Running) -> None:
    code = pods.start(job).wait(COMMAND_SECONDS_MAX)
    assert code == 0, job.log


def command(deployed: Deployed, *arguments: str) -> str:
    """As `kubectl exec deploy/pointsman-tools --` runs it."""
    tools = deployed.one("tools")
    before = len(tools.log) if tools.root.exists() else 0
    code = deployed.pods.start(tools, command=list(arguments)).wait(COMMAND_SECONDS_MAX)
    assert code == 0, tools.log
    return tools.log[before:]


def serving(deployed: Deployed) -> set[str]:
    listed = command(deployed, "pointsman", "fleet", "--from", "nats://pointsman-nats:4222", "--json")
    return {one["instance"] for one in json.loads(listed)["instances"] if one["status"] == "ready"}


def ready_engines(deployed: Deployed) -> float:
    """By the scheduler's metrics."""
    page = get(deployed.one("scheduler").url("admin", "/metrics"))
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(r'pointsman_engines{.*"ready"', line))


def ask(deployed: Deployed, prompt: str = PROMPT) -> tuple[str, Any]:
    """The instance that answered, and what."""
    (ingress,) = deployed.pods.of("ingress")
    return chat(ingress.url("http", "/v1/chat/completions"), prompt, max_tokens=8)


def chat(url: str, prompt: str, *, max_tokens: int) -> tuple[str, Any]:
    body = {"model": "pointsman-sim", "max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}]}
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=COMMAND_SECONDS_MAX) as answer:
        return answer.headers.get("x-pointsman-instance", ""), json.load(answer)


def requests_in(engine: Running) -> float:
    page = get(engine.url("http", "/metrics"))
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_running"))


def get(url: str) -> str:
    try:
        with urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except HTTPError:
        return "null"


def until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found
