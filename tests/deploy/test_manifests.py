"""deploy/kubernetes: what Kubernetes would refuse, and what would start and then not work."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, FILE_SUFFIX, FleetSettings
from pointsman_cli.up.scripts import settings_type_of
from pointsman_ingress.settings import IngressSettings
from tests.support.compose import ROOT, settings_of
from tests.support.manifests import (
    KUBERNETES,
    NAMESPACE,
    OVERLAYS,
    PODS,
    WORKLOADS,
    Object,
    Pod,
    all_pods,
    by_name,
    matches,
    overlaid,
    pod_at,
    pods,
    rendered,
    selects,
    walk,
)

OLDEST, NEWEST = "1.29", "1.37"
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
STATEFUL = {"pointsman-nats": "log", "pointsman-recorder": "archive"}
SPEAKS_TO_THE_API_SERVER = {"pointsman-worker", "pointsman-credentials"}
SCRAPED = ("scheduler", "ingress", "worker", "rebalancer", "scaler", "recorder")
WITHOUT_ENGINES = "ha"
BALANCER_SECONDS = 15
COPY_SECONDS = 600
"""Of a full log of 4 GiB, at 7 MB/s."""
GIBIBYTE = 2**30
SERVING = [place for place in PODS if not place.endswith(("-credentials", "-tools"))]
OWN = [place for place in SERVING if not place.endswith(("-nats", "-vllm"))]
"""Those that run a service of ours."""
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture
def pod(request: pytest.FixtureRequest) -> Pod:
    return pod_at(request.param)


def test_the_pods_that_are_judged_are_all_that_there_are() -> None:
    found = all_pods()

    assert {str(pod) for pod in found} == {*PODS}
    assert {str(pod) for pod in found if pod.own_service()} == {*OWN}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@each_overlay
def test_every_object_is_of_its_schema_without_a_field_that_is_unknown(
    overlay: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kubernetes_validate  # type: ignore[import-untyped]  # here, since importing it takes seconds

    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", schema_contents())
    for found in rendered(overlay):
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, version, strict=True)


@each_overlay
def test_every_object_is_in_the_namespace_has_our_labels_and_is_there_once(overlay: str) -> None:
    objects = rendered(overlay)
    assert len({(o["kind"], o["metadata"]["name"]) for o in objects}) == len(objects)
    for found in objects:
        if found["kind"] != "Namespace":
            assert found["metadata"]["labels"]["app.kubernetes.io/part-of"] == "pointsman"
        assert found["metadata"].get("namespace") == ("pointsman" if found["kind"] != "Namespace" else None)


@pytest.mark.parametrize("pod", PODS, indirect=True)
def test_every_pod_meets_the_restricted_standard(pod: Pod) -> None:
    """Pod Security Standards, restricted, v1.37; and a read-only root, which they do not ask for."""
    spec, container = pod.spec, pod.container
    security = container["securityContext"]

    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    assert not {"privileged", "procMount", "seLinuxOptions", "runAsUser", "runAsNonRoot"} & set(security)
    assert not [port for port in container.get("ports", []) if "hostPort" in port]
    for volume in spec.get("volumes", []):
        assert set(volume) - {"name"} < {
            "configMap", "secret", "projected", "emptyDir", "persistentVolumeClaim", "downwardAPI", "csi", "ephemeral"
        }  # fmt: skip


@pytest.mark.parametrize("pod", PODS, indirect=True)
def test_every_pod_is_bounded_and_gets_neither_a_token_nor_variables_of_services_unasked(pod: Pod) -> None:
    assert pod.spec["enableServiceLinks"] is False
    assert pod.spec["automountServiceAccountToken"] is (pod.name in SPEAKS_TO_THE_API_SERVER)
    assert {"cpu", "memory"} <= set(pod.container["resources"]["requests"])
    assert "memory" in pod.container["resources"]["limits"]


@pytest.mark.parametrize("pod", PODS, indirect=True)
def test_what_a_pod_names_is_there(pod: Pod) -> None:
    objects = rendered(pod.overlay)
    maps, secrets = by_name(objects, "ConfigMap"), made_by_the_job(objects)
    claims = {template["metadata"]["name"] for template in pod.workload["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | claims
    mounted = [mount["name"] for mount in pod.container.get("volumeMounts", [])]

    for path, found in walk(pod.spec):
        match path[-1] if path else "", found:
            case "configMapRef" | "configMap", {"name": name}:
                assert name in maps
            case "configMapKeyRef", {"name": name, "key": key}:
                assert key in maps[name]["data"]
            case "secret", {"name": name} | {"secretName": name}:
                assert name in secrets
            case "persistentVolumeClaim", {"claimName": name}:
                assert name in by_name(objects, "PersistentVolumeClaim")
            case "serviceAccountName", name:
                assert name in by_name(objects, "ServiceAccount")
            case "port", str() as name:
                assert name in pod.ports
            case _:
                pass
    assert sorted(mounted) == sorted(volumes)
    assert "/tmp" in {mount["mountPath"] for mount in pod.container["volumeMounts"]}


@pytest.mark.parametrize("pod", SERVING, indirect=True)
def test_every_pod_that_serves_has_all_probes_on_ports_that_it_names(pod: Pod) -> None:
    container = pod.container
    start, live, ready = (container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness"))

    assert {start["port"], live["port"], ready["port"]} <= set(pod.ports)
    if pod.labels["app.kubernetes.io/name"] == "pointsman" and "admin" in pod.ports:
        assert (start["path"], live["path"], ready["path"]) == ("/livez", "/livez", "/readyz")
        assert {start["port"], live["port"], ready["port"]} == {"admin"}


@pytest.mark.parametrize("pod", OWN, indirect=True)
def test_every_setting_of_a_pod_is_known_to_its_service_and_has_a_value_that_it_takes(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = pod.own_service()
    assert service is not None
    settings = settings_of(service, monkeypatch)

    known = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(settings)}
    deployment = set(by_name(rendered(pod.overlay), "ConfigMap")["pointsman-settings"]["data"])
    assert {name.removesuffix(FILE_SUFFIX) for name in set(service.variables) - deployment} <= known
    assert settings.host == "0.0.0.0"
    assert settings.port in pod.ports.values()
    if isinstance(settings, IngressSettings):
        assert (settings.admin_host, settings.admin_port) == ("0.0.0.0", pod.ports["admin"])
        stopping = settings.lame_duck_seconds + settings.drain_seconds_max
        assert pod.spec["terminationGracePeriodSeconds"] >= stopping + BALANCER_SECONDS


@each_overlay
def test_every_setting_that_all_processes_get_is_known_to_the_services(overlay: str) -> None:
    scripts = {service.script for pod in pods(overlay) if (service := pod.own_service())}
    known = {ENVIRONMENT_PREFIX + f.name.upper() for script in scripts for f in fields(settings_type_of(script))}
    for name in ("pointsman-settings", "pointsman-engine-urls"):
        data = by_name(rendered(overlay), "ConfigMap")[name]["data"]
        assert {key.removesuffix(FILE_SUFFIX) for key in data} <= known


@each_overlay
def test_selectors_find_what_they_are_for(overlay: str) -> None:
    objects, found_pods = rendered(overlay), pods(overlay)
    for pod in found_pods:
        if pod.workload["kind"] != "Job":
            assert selects(pod.workload["spec"]["selector"], pod.labels)
        for path, found in walk(pod.spec):
            if path and path[-1] == "labelSelector":
                assert selects(found, pod.labels)
    for name, service in by_name(objects, "Service").items():
        behind = [pod for pod in found_pods if selects(service["spec"]["selector"], pod.labels)]
        if not (overlay == WITHOUT_ENGINES and name == "pointsman-engines"):
            assert behind
            for port in service["spec"]["ports"]:
                assert any(port["targetPort"] in pod.ports for pod in behind)
    for budget in by_name(objects, "PodDisruptionBudget").values():
        (pod,) = (pod for pod in found_pods if selects(budget["spec"]["selector"], pod.labels))
        assert pod.workload["kind"] != "Job"
        assert budget["spec"]["maxUnavailable"] == 1  # of a single pod, too: a node can always be drained
    for name, stateful in by_name(objects, "StatefulSet").items():
        service = by_name(objects, "Service")[stateful["spec"]["serviceName"]]
        assert service["spec"]["clusterIP"] == "None"
        assert [t["metadata"]["name"] for t in stateful["spec"]["volumeClaimTemplates"]] == [STATEFUL[name]]
    assert set(by_name(objects, "StatefulSet")) == set(STATEFUL)


@each_overlay
def test_accounts_have_the_rights_that_their_programs_use_and_no_others(overlay: str) -> None:
    objects = rendered(overlay)
    assert not [o for o in objects if o["kind"].startswith("Cluster")]
    roles, bindings = by_name(objects, "Role"), by_name(objects, "RoleBinding")
    assert set(roles) == set(bindings) == SPEAKS_TO_THE_API_SERVER
    for name, binding in bindings.items():
        assert binding["roleRef"]["name"] == name
        assert [subject["name"] for subject in binding["subjects"]] == [name]
        (pod,) = (pod for pod in pods(overlay) if pod.spec.get("serviceAccountName") == name)
        assert pod.name == name
    worker = [(r["apiGroups"], r["resources"], sorted(r["verbs"])) for r in roles["pointsman-worker"]["rules"]]
    assert worker == [(["discovery.k8s.io"], ["endpointslices"], ["list", "watch"])]
    created, got, updated = roles["pointsman-credentials"]["rules"]
    assert {verb for rule in (created, got, updated) for verb in rule["verbs"]} == {"create", "get", "update"}
    assert (created["verbs"], got["verbs"], updated["verbs"]) == (["create"], ["get"], ["update"])
    assert set(got["resourceNames"]) == made_by_the_job(objects)
    assert updated["resourceNames"] == ["pointsman-nats-users"]


@each_overlay
def test_the_archive_is_bounded_below_its_volume_and_above_the_log(overlay: str) -> None:
    (recorder,) = (pod for pod in pods(overlay) if pod.name == "pointsman-recorder")
    (claim,) = recorder.workload["spec"]["volumeClaimTemplates"]
    volume = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * GIBIBYTE
    bound = int(recorder.environment()["POINTSMAN_ARCHIVE_BYTES_MAX"])

    assert 2 * FleetSettings().log_bytes_max <= bound <= 0.8 * volume


@each_overlay
def test_a_restart_for_new_settings_restarts_all_that_read_them_and_neither_engines_nor_nats(overlay: str) -> None:
    page, comment = (ROOT / "docs/kubernetes.md").read_text(), (KUBERNETES / "base/settings.yaml").read_text()
    queries = re.findall(r"rollout restart deployment,statefulset -l '(\S+)'", page + comment)
    readers = {pod.name for pod in pods(overlay) if "pointsman-settings" in str(pod.container.get("envFrom"))}

    assert len(queries) == 3
    for query in queries:
        assert {
            pod.name
            for pod in pods(overlay)
            if pod.workload["kind"] in ("Deployment", "StatefulSet")
            and matches(query, pod.workload["metadata"]["labels"])
        } == readers


def test_in_a_cluster_a_server_of_nats_has_started_once_its_streams_are_current() -> None:
    (nats,) = (pod for pod in pods("ha") if pod.name == "pointsman-nats")
    start = nats.container["startupProbe"]

    assert start["httpGet"]["path"] == "/healthz"
    assert start["failureThreshold"] * start["periodSeconds"] >= COPY_SECONDS


@each_overlay
def test_the_log_has_as_many_copies_as_there_are_servers_and_everybody_knows_them_all(overlay: str) -> None:
    objects = rendered(overlay)
    servers = by_name(objects, "StatefulSet")["pointsman-nats"]["spec"]
    settings = by_name(objects, "ConfigMap")["pointsman-settings"]["data"]
    configuration = by_name(objects, "ConfigMap")["pointsman-nats"]["data"]["nats.conf"]
    hosts = [f"pointsman-nats-{n}.{servers['serviceName']}" for n in range(servers["replicas"])]

    assert settings["POINTSMAN_LOG_REPLICAS"] == str(servers["replicas"])
    if servers["replicas"] == 1:
        assert settings["POINTSMAN_NATS"] == f"nats://{servers['serviceName']}:4222"
        assert "cluster {" not in configuration
    else:
        assert settings["POINTSMAN_NATS"].split(",") == [f"nats://{host}:4222" for host in hosts]
        assert 'include "users/nats-routes.conf"' in configuration
        assert "podAntiAffinity" in servers["template"]["spec"]["affinity"]
        assert servers["template"]["spec"]["terminationGracePeriodSeconds"] > 5 + 30


def test_a_process_listens_on_a_port_that_its_container_declares() -> None:
    containers = [container for pod in all_pods() for container in pod.spec["containers"]]
    told = {
        (container["name"], int(port), port in [str(one["containerPort"]) for one in container.get("ports", [])])
        for container in containers
        for port in re.findall(
            r"--port[= ](\d+)", " ".join([*container.get("command", []), *container.get("args", [])])
        )
    }

    assert told
    assert {one for one in told if not one[2]} == set()


def test_what_must_not_pause_is_there_twice_in_the_ha_overlay_and_spread() -> None:
    found = {pod.name: pod for pod in pods("ha")}
    for name in ("pointsman-scheduler", "pointsman-ingress", "pointsman-scaler"):
        assert found[name].workload["spec"]["replicas"] == 2
        keys = {one["topologyKey"] for one in found[name].spec["topologySpreadConstraints"]}
        assert keys == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}


@each_overlay
def test_one_worker_follows_the_engines_of_the_service_by_its_label(overlay: str) -> None:
    (worker,) = (pod for pod in pods(overlay) if pod.name == "pointsman-worker")
    key, _, value = worker.environment()["POINTSMAN_DISCOVER"].removeprefix("kubernetes:").partition("=")
    services = [o for o in rendered(overlay) if o["kind"] == "Service" and o["metadata"]["labels"].get(key) == value]

    assert worker.workload["spec"]["strategy"] == {"type": "Recreate"}
    assert worker.workload["spec"]["replicas"] == 1
    assert [service["metadata"]["name"] for service in services] == ["pointsman-engines"]
    assert {port["name"] for port in services[0]["spec"]["ports"]} == {"http", "kv-events", "kv-replay"}
    assert worker.environment()["POINTSMAN_POOL"] == value


def test_no_manifest_says_how_many_pods_there_are_where_keda_does() -> None:
    """Else each `kubectl apply` scales the engines."""
    objects = rendered("gpu-vllm")
    (scaled,) = by_name(objects, "ScaledObject").values()
    target = by_name(objects, "Deployment")[scaled["spec"]["scaleTargetRef"]["name"]]

    assert "replicas" not in target["spec"]


def test_kedas_object_asks_the_scaler_for_pods_of_two_instances_within_the_scalers_limits() -> None:
    objects = rendered("gpu-vllm")
    (scaled,) = by_name(objects, "ScaledObject").values()
    (trigger,) = scaled["spec"]["triggers"]
    scaler = next(pod for pod in pods("gpu-vllm") if pod.name == "pointsman-scaler").environment()
    engines = by_name(objects, "Service")["pointsman-engines"]["metadata"]["labels"]
    ranks = int(engines["pointsman.io/data-parallel-size"])
    vllm = by_name(objects, "Deployment")[scaled["spec"]["scaleTargetRef"]["name"]]["spec"]["template"]["spec"]
    (container,) = vllm["containers"]

    judge_keys(scaled["spec"], "scaleTargetRef pollingInterval minReplicaCount maxReplicaCount advanced triggers")
    judge_keys(trigger, "type metricType metadata")
    judge_keys(trigger["metadata"], "url valueLocation targetValue")
    assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
    assert trigger["metadata"]["valueLocation"] == "desired"
    assert int(trigger["metadata"]["targetValue"]) == ranks
    assert trigger["metadata"]["url"] == f"http://pointsman-scaler.{NAMESPACE}.svc:8080/desired"
    assert by_name(objects, "Service")["pointsman-scaler"]["spec"]["ports"][0]["port"] == 8080
    assert scaled["spec"]["minReplicaCount"] * ranks == int(scaler["POINTSMAN_MIN_INSTANCES"])
    assert scaled["spec"]["maxReplicaCount"] * ranks == int(scaler["POINTSMAN_MAX_INSTANCES"])
    assert scaler["POINTSMAN_PROVIDER"] == "static"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert f"--data-parallel-size={ranks}" in container["args"]


@pytest.mark.parametrize("resource", ["../single", "../ha", "../gpu-vllm"])
def test_the_overlay_of_the_page_with_another_namespace_has_nothing_of_the_first(resource: str) -> None:
    """Else the second deployment is scaled by the first one's scaler, and its accounts have no rights."""
    own = {**overlays_of_the_page()[0], "namespace": "second", "resources": [resource]}
    if resource == "../gpu-vllm":
        own["transformers"] = ["../../components/keda/namespace"]
        assert "`transformers: [../../components/keda/namespace]`" in (ROOT / "docs/kubernetes.md").read_text()
    objects = overlaid(own)

    for found in objects:
        if found["kind"] in WORKLOADS:
            assert found["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert {found["metadata"].get("namespace", found["metadata"]["name"]) for found in objects} == {"second"}
    assert {found for path, found in walk(list(objects)) if path[-1:] == ("namespace",)} == {"second"}
    for scaled in by_name(objects, "ScaledObject").values():
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"]["url"] == "http://pointsman-scaler.second.svc:8080/desired"


@pytest.mark.parametrize("own", [False, True], ids=["component", "page"])
def test_a_scaler_that_starts_pods_has_the_account_the_role_and_the_variables_for_its_workload(own: bool) -> None:
    component = {"resources": ["../single"], "components": ["../../components/kubernetes-provider"]}
    documented = {**overlays_of_the_page()[1], "resources": ["../ha"]}
    objects = overlaid({**(documented if own else component), "namespace": "second"})
    pod = Pod("single", by_name(objects, "Deployment")["pointsman-scaler"])
    role, binding = (by_name(objects, kind)["pointsman-scaler"] for kind in ("Role", "RoleBinding"))
    kind, name = ("statefulset", "engines") if own else ("deployment", "pointsman-engine")

    assert pod.spec["serviceAccountName"] in by_name(objects, "ServiceAccount")
    assert pod.spec["automountServiceAccountToken"] is True
    assert (binding["roleRef"]["name"], role["metadata"]["namespace"]) == ("pointsman-scaler", "second")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "pointsman-scaler", "namespace": "second"}]
    assert role["rules"] == [  # of which tests/contract/test_kubernetes_provider.py says that they are enough
        {"apiGroups": ["apps"], "resources": [f"{kind}s/scale"], "verbs": ["get", "patch"], "resourceNames": [name]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"] if own else ["list", "patch"]},
    ]
    variables = pod.environment_in(objects)
    assert variables["POINTSMAN_PROVIDER"] == "kubernetes"
    assert variables["POINTSMAN_KUBERNETES_WORKLOAD"] == f"{kind}/{name}"
    assert variables["POINTSMAN_KUBERNETES_NAMESPACE"] == "<metadata.namespace>"
    if not own:
        assert "replicas" not in by_name(objects, "Deployment")[name]["spec"]


def overlays_of_the_page() -> list[Object]:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
    return [block for text in blocks if (block := yaml.safe_load(text))["kind"] == "Kustomization"]


def test_an_image_of_engines_changes_where_no_gpu_is_free_within_the_time_that_engines_take() -> None:
    (engines,) = (pod for pod in pods("gpu-vllm") if pod.name == "pointsman-vllm")
    spec, start = engines.workload["spec"], engines.container["startupProbe"]

    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    loading = start["periodSeconds"] * start["failureThreshold"]
    assert spec["progressDeadlineSeconds"] > engines.spec["terminationGracePeriodSeconds"] + loading


def test_prometheus_finds_every_process_and_knows_it_by_its_service() -> None:
    objects = rendered("gpu-vllm")
    (monitor,) = by_name(objects, "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    services = [
        s for s in by_name(objects, "Service").values() if selects(monitor["spec"]["selector"], s["metadata"]["labels"])
    ]
    (service,) = services
    (port,) = (port for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
    scraped = {
        pod.name
        for pod in pods("gpu-vllm")
        if selects(service["spec"]["selector"], pod.labels) and port["targetPort"] in pod.ports
    }

    judge_keys(monitor["spec"], "selector endpoints")
    judge_keys(endpoint, "port interval relabelings")
    assert scraped == {f"pointsman-{name}" for name in SCRAPED}
    (relabeling,) = endpoint["relabelings"]
    judge_keys(relabeling, "sourceLabels targetLabel replacement")
    assert relabeling["replacement"].replace("$1", "scheduler") == "pointsman-scheduler"
    (rule,) = by_name(objects, "PrometheusRule").values()
    judge_keys(rule["spec"], "groups")
    for group in rule["spec"]["groups"]:
        judge_keys(group, "name rules interval")
        for one in group["rules"]:
            judge_keys(one, "alert record expr for keep_firing_for labels annotations")
            assert isinstance(one["expr"], str)


def made_by_the_job(objects: tuple[Object, ...]) -> set[str]:
    script = by_name(objects, "ConfigMap")["pointsman-scripts"]["data"]["credentials.py"]
    assert script == (KUBERNETES / "base" / "credentials.py").read_text()
    services = re.search(r"^SERVICES = \((.*)\)$", script, re.MULTILINE)
    assert services is not None
    named = set(re.findall(r'"(pointsman-[a-z-]+[a-z])"', script))
    return named | {f"pointsman-nats-{name}" for name in re.findall(r'"(\w+)"', services[1])}


@cache
def schema_contents() -> Callable[[str, str], Any]:
    """Of the validator, but each schema is read once."""
    from kubernetes_validate import utils

    return cache(utils.schema_contents)


def judge_keys(found: Object, known: str) -> None:
    """Of objects that have no schema here: Prometheus Operator's and KEDA's."""
    assert set(found) <= set(known.split())
