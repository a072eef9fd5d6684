"""The Helm chart, rendered by Helm, says what Kustomize says, object by object."""

import re
import tomllib
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency
from helm_python import HelmValuesError, lint

from tests.support.compose import ROOT
from tests.support.deploy_scripts import deploy_script
from tests.support.manifests import CHART, WORKLOADS, Object, Pod, by_name, chart, kubectl, pods, rendered

GPU = {"highAvailability": True, "vllm": {"enabled": True}, "monitoring": True, "keda": True}
VALUES: dict[str, dict[str, Any]] = {
    "single": {},
    "ha": {"highAvailability": True, "simulatedEngines": False},
    "gpu-vllm": GPU,
}
REFUSED = {
    *("POINTSMAN_SECRET_FILE", "POINTSMAN_NATS_CREDENTIALS", "POINTSMAN_STATE_DIRECTORY", "POINTSMAN_PORT"),
    *("POINTSMAN_ADMIN_HOST", "POINTSMAN_ADMIN_PORT", "POINTSMAN_NAME", "POINTSMAN_PROVIDER"),
}
"""Volumes, ports, names and accounts of the chart depend on them."""


@pytest.mark.parametrize("overlay", VALUES)
def test_the_chart_renders_to_the_objects_of_the_overlay(overlay: str) -> None:
    of_chart, of_kustomize = keyed(chart(VALUES[overlay])), keyed(rendered(overlay))
    namespaces = {key for key in of_kustomize if key[0] == "Namespace"}

    assert set(of_chart) == set(of_kustomize) - namespaces
    for key, found in of_chart.items():
        assert found == of_kustomize[key]


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    found = lint(CHART, strict=True)

    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    "values", [{"highAvailable": True}, {"vllm": {"modle": "m"}}, {"monitoring": "yes"}, {"image": 1.0}, {"vllm": True}]
)
def test_a_value_that_nothing_reads_or_of_another_type_is_refused(values: dict[str, Any]) -> None:
    assert next(iter(values)) in refusal(values)


@pytest.mark.parametrize("name", ["POINTSMAN_REQUIRE_KEY", "POINTSMAN_POOL_FILE", "require_keys"])
def test_a_setting_that_no_process_reads_is_refused(name: str) -> None:
    assert name in refusal({"settings": {name: True}})


def test_settings_may_be_any_of_a_process_a_file_of_a_secret_or_of_others() -> None:
    settings = {
        "POINTSMAN_REQUIRE_KEYS": True,
        "POINTSMAN_ENGINE_API_KEY_FILE": "/key",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
    }

    rendered_settings = keyed(chart({"settings": settings}))[("ConfigMap", "pointsman-settings")]["data"]

    assert settings.keys() <= rendered_settings.keys()


def test_other_settings_restart_what_reads_them_and_nothing_else() -> None:
    """`helm upgrade` with POINTSMAN_REQUIRE_KEYS changed a ConfigMap alone: the ingresses went on without keys."""
    told = [{"POINTSMAN_REQUIRE_KEYS": False}, {"POINTSMAN_REQUIRE_KEYS": True}]
    first, second = (keyed(chart({"console": True, "settings": settings})) for settings in told)
    templates = {
        key: (found["spec"]["template"], second[key]["spec"]["template"])
        for key, found in first.items()
        if "template" in found.get("spec", {})
    }

    reading = {key for key, (template, _) in templates.items() if "'pointsman-settings'" in str(template)}
    assert {key[1] for key in reading} > {"pointsman-ingress", "pointsman-scheduler", "pointsman-worker"}
    assert {key for key, (before, after) in templates.items() if before != after} == reading - {
        ("Job", "pointsman-credentials")
    }


def test_a_parent_chart_may_give_global_values() -> None:
    assert keyed(chart({"global": {"imageRegistry": "r"}})) == keyed(chart({}))


def test_each_value_reaches_what_it_names() -> None:
    values = {
        "image": "registry/pointsman@sha256:1",
        "pool": "qwen",
        "settings": {"POINTSMAN_LOG_LEVEL": "debug"},
        "vllm": {"enabled": True, "image": "vllm:1", "model": "m/m"},
    }
    changed = chart(values)
    text = yaml.safe_dump_all(changed)
    settings = next(o for o in changed if o["metadata"]["name"] == "pointsman-settings")["data"]

    assert settings["POINTSMAN_LOG_LEVEL"] == "debug"
    assert settings["POINTSMAN_POOL"] == "qwen"
    assert "kubernetes:pointsman.io/pool=qwen" in text
    assert set(re.findall(r"image: (\S+)", text)) == {"registry/pointsman@sha256:1", "vllm:1"}
    assert not re.search(r"pointsman\.io/pool: default|pool=default", text)
    assert "- m/m\n" in text


@pytest.mark.parametrize("overlay", VALUES)
def test_every_pod_and_account_may_fetch_from_a_registry_that_wants_a_login(overlay: str) -> None:
    secrets = [{"name": "registry"}, {"name": "other"}]
    plain, changed = chart(VALUES[overlay]), chart({**VALUES[overlay], "imagePullSecrets": secrets, "console": True})
    fetching = [o["spec"]["template"]["spec"] for o in changed if o["kind"] in WORKLOADS]
    fetching += [found for found in changed if found["kind"] == "ServiceAccount"]

    assert len(fetching) > 10
    assert [found for found in fetching if found.get("imagePullSecrets") != secrets] == []
    assert "imagePullSecrets" not in str(plain)


def test_one_value_alone_gives_a_pool_of_one_kind_of_engines() -> None:
    engines = {"pointsman-engine", "pointsman-vllm"}

    assert engines & set(by_name(chart({}), "Deployment")) == {"pointsman-engine"}
    assert engines & set(by_name(chart({"vllm": {"enabled": True}}), "Deployment")) == {"pointsman-vllm"}
    assert "builtin" not in yaml.safe_dump_all(chart({"vllm": {"enabled": True}}))
    assert keyed(chart({"keda": True})) == keyed(chart({}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(("text", "text"), ("", ""), (True, "true"), (False, "false"), (7, "7"), (0, "0"), (0.25, "0.25")),
        *((1_000_000.0, "1000000"), (68_719_476_736.0, "68719476736")),  # Helm reads whole numbers of a file so
    ],
)
def test_a_setting_may_be_of_any_type_and_counts_before_the_charts_own(value: object, text: str) -> None:
    own = settings_of({})

    for name in ("POINTSMAN_BLOCK_TOKENS", "POINTSMAN_NATS", "POINTSMAN_LOG_REPLICAS", "POINTSMAN_REQUIRE_KEYS"):
        assert settings_of({"settings": {name: value}}) == own | {name: text}


@pytest.mark.parametrize("overlay", VALUES)
def test_a_setting_reaches_every_process_or_is_refused_with_what_to_do(overlay: str) -> None:
    """Whatever name the manifests give a value, in a ConfigMap or to one process."""
    processes = [pod for pod in pods(overlay) if "pointsman-settings" in str(pod.container.get("envFrom"))]
    names = {name for pod in processes for name in pod.environment() if name.startswith("POINTSMAN_")}
    refused = {name: why for name in names if (why := refusal({**VALUES[overlay], "settings": {name: "12345"}}))}
    taken = dict.fromkeys(names - set(refused), "12345")

    objects = chart({**VALUES[overlay], "settings": taken})

    assert processes
    for found in objects:
        if found["kind"] in WORKLOADS and found["metadata"]["name"] in {pod.name for pod in processes}:
            assert taken.items() <= Pod(overlay, found).environment_in(objects).items()
    assert set(refused) == REFUSED
    for name, why in refused.items():
        assert name in why
        assert "post-renderer" in why


def refusal(values: dict[str, Any]) -> str:
    """Empty if Helm takes them."""
    try:
        chart(values)
    except HelmValuesError as error:
        return str(error)
    return ""


def settings_of(values: dict[str, Any]) -> dict[str, str]:
    return dict(by_name(chart(values), "ConfigMap")["pointsman-settings"]["data"])


def test_the_files_that_are_generated_are_the_newest() -> None:
    """Else: make manifests."""
    generator = deploy_script("helm/generate.py")
    files = generator.written(kubectl())

    assert {path for path in files if path.parent == generator.TEMPLATES} == set(generator.TEMPLATES.glob("*"))
    assert [path.name for path, text in files.items() if path.read_text() != text] == []


def test_the_chart_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert metadata["version"] == metadata["appVersion"] == version
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"] == f"pointsman:{version}"


def keyed(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    found = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert len(found) == len(objects)
    return found
