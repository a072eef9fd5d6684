"""docker-compose.yml: that what it says is understood, and, where a Docker engine answers, that it runs."""

import json
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import click
import pytest

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, options
from tests.support.compose import ROOT, OwnService, compose_services, own_services, settings_type_of

CHAT = {"model": "pointsman-sim", "max_tokens": 8, "messages": [{"role": "user", "content": "a long prompt " * 200}]}
START_SECONDS_MAX = 600


@pytest.mark.parametrize("service", own_services(), ids=lambda service: service.name)
def test_every_setting_that_compose_gives_is_known_to_its_service_and_has_a_value_that_it_takes(
    service: OwnService, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = options(settings_type_of(service.script))
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    arguments = [f"{flag}={value}" for flag, value in service.flags.items()]

    accepted = click.Command(service.script, params=list(known)).make_context(service.script, arguments).params

    assert set(service.variables) <= {ENVIRONMENT_PREFIX + name.upper() for name in accepted}
    assert accepted["port"] == 8080  # what the image's health check asks
    assert accepted["host"] == "0.0.0.0"


def test_every_service_of_the_fleet_is_there_with_a_worker_beside_each_engine() -> None:
    services = compose_services()
    scripts = [service.script for service in own_services()]
    workers = {
        s.environment["POINTSMAN_INSTANCE"]: s.environment for s in own_services() if s.script == "pointsman-worker"
    }

    assert {"scheduler", "ingress", "rebalancer", "scaler", "recorder", "nats"} <= set(services)
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
        environment.setenv("POINTSMAN_SECRET", secrets.token_hex(16))
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
