"""docker-compose.yml: that what it says is understood, and, where a Docker engine answers, that it runs."""

import json
import re
import secrets
import shutil
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, ProcessSettings, command, options
from tests.support.compose import (
    COMPOSE_FILE,
    ROOT,
    SETTINGS_FILES,
    OwnService,
    compose_services,
    own_services,
    settings_type_of,
)

CHAT = {"model": "pointsman-sim", "max_tokens": 8, "messages": [{"role": "user", "content": "a long prompt " * 200}]}
START_SECONDS_MAX = 600


@pytest.fixture
def settings_directory(tmp_path: Path) -> Path:
    """/etc/pointsman of a container."""
    for number, file in enumerate(SETTINGS_FILES):
        (tmp_path / f"{number}.toml").write_text((ROOT / file).read_text())
    return tmp_path


@pytest.mark.parametrize("service", own_services(), ids=lambda service: service.name)
def test_every_setting_that_compose_gives_is_known_to_its_service_and_has_a_value_that_it_takes(
    service: OwnService, settings_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("POINTSMAN_CONFIG", str(settings_directory))
    if "POINTSMAN_SECRET_FILE" in service.variables:
        monkeypatch.setenv("POINTSMAN_SECRET_FILE", str(ROOT / "LICENSE"))
    read: list[ProcessSettings] = []
    table = service.script.removeprefix("pointsman-")

    command(settings_type_of(service.script), name=service.script, table=table)(read.append).main(
        [f"{flag}={value}" for flag, value in service.flags.items()], standalone_mode=False
    )

    known = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(read[0])} | {"POINTSMAN_SECRET_FILE"}
    assert set(service.variables) <= known
    assert (read[0].host, read[0].port) == ("0.0.0.0", 8080)


def test_every_setting_of_the_settings_file_is_known_to_a_service() -> None:
    scripts = {service.script for service in own_services()}
    known = {script: {option.name for option in options(settings_type_of(script))} for script in scripts}
    for file in SETTINGS_FILES:
        for key, value in tomllib.loads((ROOT / file).read_text()).items():
            if isinstance(value, dict):
                assert set(value) <= known[f"pointsman-{key}"]
            else:
                assert any(key in names for names in known.values()), key


def test_no_variable_outranks_a_settings_file_unless_the_service_cannot_run_without() -> None:
    needed = {"POOL", "SECRET_FILE", "ENGINE_URLS", "TOKENIZER"}
    own = {"INSTANCE", "ENGINE_URL", "KV_ENDPOINT", "KV_REPLAY_ENDPOINT", "ENGINE_MODEL"}
    for service in own_services():
        if not service.name.endswith("-gpu"):
            allowed = needed | (own if service.script == "pointsman-worker" else set())
            assert {name.removeprefix(ENVIRONMENT_PREFIX) for name in service.variables} <= allowed
    final_stage = (ROOT / "deploy/Dockerfile").read_text().rsplit("FROM ", 1)[1]
    assert re.findall(r"POINTSMAN_\w+", final_stage) == ["POINTSMAN_CONFIG"]


def test_one_service_builds_the_image_and_nobody_pulls_it() -> None:
    services = compose_services()
    building = [name for name, service in services.items() if "build" in service]

    assert building == ["credentials"]
    for name, service in services.items():
        if service["image"] == services["credentials"]["image"] and name not in building:
            assert service["pull_policy"] == "never"


def test_nothing_has_to_be_set() -> None:
    assert not re.findall(r"\$\{\w+:?\?", COMPOSE_FILE.read_text())


def test_every_service_of_the_fleet_is_there_with_a_worker_beside_each_engine() -> None:
    services = compose_services()
    scripts = [service.script for service in own_services()]
    workers = {
        s.environment["POINTSMAN_INSTANCE"]: s.environment for s in own_services() if s.script == "pointsman-worker"
    }

    assert {"scheduler", "ingress", "rebalancer", "scaler", "recorder", "nats", "credentials"} <= set(services)
    assert scripts.count("pointsman-engine-sim") == 2
    assert set(workers) == {name for name in services if name.startswith("engine-")}
    for engine, environment in workers.items():
        assert environment["POINTSMAN_KV_ENDPOINT"] == f"tcp://{engine}:5557"
        assert environment["POINTSMAN_ENGINE_URL"].startswith(f"http://{engine}:")


def test_ports_are_published_on_the_loopback_only() -> None:
    published = [port for service in compose_services().values() for port in service.get("ports", [])]

    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", compose_services())
def test_every_container_is_confined(name: str) -> None:
    service = compose_services()[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["CHOWN"] if name == "credentials" else [])
    assert service.get("user", "10001:10001") == ("0:0" if name == "credentials" else "10001:10001")
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert "privileged" not in service
    assert not [volume for volume in service.get("volumes", []) if "docker.sock" in str(volume)]


def test_an_engine_reaches_neither_nats_nor_the_engines_of_another_pool() -> None:
    networks = {name: set(service["networks"]) for name, service in compose_services().items()}
    engines = {name for name in networks if name.startswith("engine-")}

    for engine in engines:
        reached = {name for name, own in networks.items() if own & networks[engine]} - {engine}
        alike = {name for name in engines if networks[name] == networks[engine]}
        assert reached - alike <= {name for name in networks if name.startswith(("worker-", "ingress"))}
    assert networks["engine-1"].isdisjoint(networks["engine-gpu"])
    assert networks["nats"] == {"bus"}


def test_nobody_waits_for_a_service_that_is_not_there_or_has_no_health_check() -> None:
    services = compose_services()
    for service in services.values():
        for awaited in service.get("depends_on", {}):
            assert "healthcheck" in services[awaited]


@pytest.fixture(scope="module")
def fleet_url() -> Iterator[str]:
    reason = why_no_docker()
    if reason:
        pytest.skip(reason)
    from testcontainers.compose import DockerCompose

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("POINTSMAN_PORT", "0")
        environment.setenv("POINTSMAN_NATS_PORT", "0")
        environment.setenv("COMPOSE_PROJECT_NAME", f"pointsman-test-{secrets.token_hex(4)}")
        with DockerCompose(str(ROOT), build=True, wait=True) as compose:
            host, port = compose.get_service_host_and_port("ingress", 8080)
            yield f"http://{host}:{port}"


@pytest.mark.timeout(START_SECONDS_MAX)
def test_the_fleet_in_containers_answers_and_sends_a_repeated_prompt_to_its_cache(fleet_url: str) -> None:
    first, second = ask(fleet_url), ask(fleet_url)

    assert first["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def ask(url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def why_no_docker() -> str:
    """Why the containers cannot be run here; empty where they can."""
    docker = shutil.which("docker")
    if docker is None:
        return "there is no docker command here"
    for question, meaning in (
        (["info"], "no Docker engine answers"),
        (["compose", "version"], "there is no docker compose"),
    ):
        if subprocess.run([docker, *question], capture_output=True, timeout=20, check=False).returncode:
            return f"{meaning} here"
    return ""
