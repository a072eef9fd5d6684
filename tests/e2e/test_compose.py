"""docker-compose.yml: that what it says is understood. tests/containers runs it."""

import re
import signal
import socket
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, options
from pointsman_cli.up.scripts import settings_type_of
from pointsman_recorder.settings import RecorderSettings
from tests.support.compose import (
    ASCEND_FILE,
    CLUSTER_FILE,
    COMPOSE_FILE,
    ROOT,
    SETTINGS_FILES,
    VARIABLE,
    OwnService,
    compose_services,
    own_services,
    settings_of,
)
from tests.support.deploy_scripts import deploy_script

SET_BY_COMPOSE = {"COMPOSE_PROJECT_NAME"}


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
    settings = settings_of(service, monkeypatch, config=settings_directory)

    known = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(settings)} | {"POINTSMAN_SECRET_FILE"}
    assert set(service.variables) <= known
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)


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
    own = {
        "pointsman-worker": {"DISCOVER", "DISCOVER_URLS", "KV_ENDPOINT", "KV_REPLAY_ENDPOINT"},
        "pointsman-scaler": {"PROVIDER"}
        | {f"DOCKER_{name}" for name in ("DNS", "NETWORK", "ENGINE_IMAGE", "ENGINE_COMMAND")},
    }
    for service in own_services():
        if not service.name.endswith("-gpu"):
            allowed = needed | own.get(service.script, set())
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


def test_the_table_of_variables_has_all_that_the_file_takes() -> None:
    page = (ROOT / "deploy/README.md").read_text().partition("\n| variable |")[2].partition("\n\n")[0]
    told = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in page.splitlines() if row.startswith("| `")))
    services = compose_services().values()
    handed_on = {name for s in services for name, value in (s.get("environment") or {}).items() if value is None}
    filled_in = {match["name"] for match in VARIABLE.finditer(COMPOSE_FILE.read_text().replace("$$", ""))}

    assert sorted(told) == sorted((filled_in | handed_on) - SET_BY_COMPOSE)


def test_the_table_of_variables_has_the_defaults_of_the_file() -> None:
    page = (ROOT / "deploy/README.md").read_text()
    used: dict[str, set[str]] = {}
    for match in VARIABLE.finditer(COMPOSE_FILE.read_text().replace("$$", "")):
        used.setdefault(match["name"], set()).add(match["rest"] or "")
    told: dict[str, str] = {}
    for row in (row.split("|") for row in page.splitlines() if row.startswith("| `")):
        names, defaults = re.findall(r"`(\w+)`", row[1]), row[2].replace("`", "").strip().split(", ")
        if len(names) == len(defaults):
            told |= {
                name: default for name, default in zip(names, defaults, strict=True) if not re.search(" |none", default)
            }

    ports = {name for name in used if name.endswith("_PORT")}
    assert told.keys() > ports | {"POINTSMAN_MEMORY", "VLLM_MODEL"}
    for name in used.keys() & told.keys() - {"POINTSMAN_SECRET"}:
        assert used[name] == {told[name]}, name


def test_what_the_settings_file_and_the_processes_call_nats_is_where_a_nats_server_listens() -> None:
    files = {COMPOSE_FILE: "nats/nats.conf", CLUSTER_FILE: "compose/nats-cluster.conf"}
    services = compose_services()
    (named,) = re.findall(r'^nats = "nats://(.*):(\d+)"', (ROOT / SETTINGS_FILES[1]).read_text(), re.MULTILINE)
    own = {tuple(url.removeprefix("nats://").split(":")) for url in _nats_addresses(services)}

    assert {named} | own == {("nats", "4222")}
    assert services["nats"]["ports"] == ["127.0.0.1:4222:4222"]
    for file, conf in files.items():
        assert 'listen: "0.0.0.0:4222"' in (ROOT / "deploy" / conf).read_text(), file


def _nats_addresses(services: dict[str, Any]) -> list[str]:
    return [url for s in services.values() for url in [(s.get("environment") or {}).get("POINTSMAN_NATS")] if url]


def test_no_container_writes_to_a_file_of_the_host() -> None:
    """But for what Docker's socket does for the gate. Named volumes are not the host's files."""
    mounts = [mount for service in compose_services().values() for mount in service.get("volumes", [])]
    binds = [m for m in mounts if (m.get("type") == "bind" if isinstance(m, dict) else m.startswith((".", "/")))]
    writable = [m for m in binds if not (m.get("read_only") if isinstance(m, dict) else m.endswith(":ro"))]

    assert len(binds) > 5
    assert [str(m) for m in writable if "docker.sock" not in str(m)] == []


def test_the_page_names_those_who_run_as_another_user() -> None:
    page = (ROOT / "deploy/README.md").read_text()
    services = compose_services()
    own = services["credentials"]["image"]
    others = {name for name, service in services.items() if service["image"] != own or "user" in service}

    assert others
    for name in others:
        assert f"`{re.sub('-[0-9]$', '-*', name)}`" in page


@pytest.mark.parametrize(
    "service", [s for s in own_services() if s.script == "pointsman-recorder"], ids=lambda s: s.name
)
def test_every_archive_is_bounded(
    service: OwnService, settings_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(service, monkeypatch, config=settings_directory)

    assert isinstance(settings, RecorderSettings)
    assert settings.archive_bytes_max >= 2 * settings.log_bytes_max


def test_nothing_has_to_be_set() -> None:
    assert not re.findall(r"\$\{\w+:?\?", COMPOSE_FILE.read_text())


def test_a_settings_file_that_is_not_there_is_an_error() -> None:
    """Docker makes a directory of the name that a short `volumes` entry gives."""
    mounts = [
        mount for s in compose_services().values() for mount in s.get("volumes", []) if "pointsman.toml" in str(mount)
    ]

    assert mounts
    assert all(isinstance(mount, dict) and mount["bind"] == {"create_host_path": False} for mount in mounts)


def test_no_value_of_a_variable_becomes_text_of_a_script() -> None:
    script = COMPOSE_FILE.read_text().partition("- -ec\n")[2].partition("\n    volumes:")[0]

    assert "$$POINTSMAN_POOL" in script
    assert not VARIABLE.search(script.replace("$$", ""))


def test_every_service_of_the_fleet_is_there_and_workers_find_engines_by_their_name_on_a_network() -> None:
    services = compose_services()
    workers = [service for service in own_services() if service.script == "pointsman-worker"]
    needed = {"credentials", "nats", "scheduler", "ingress", "rebalancer", "recorder", "engine", "worker"}

    assert needed <= {name for name, service in services.items() if "profiles" not in service}
    assert [worker.name for worker in workers] == ["worker", "worker-gpu"]
    for worker in workers:
        _, host, _ = worker.environment["POINTSMAN_DISCOVER"].split(":")
        found = [name for name, service in services.items() if host in names_on_networks(name, service)]
        assert found
        assert all(set(services[name]["networks"]) <= set(services[worker.name]["networks"]) for name in found)


def test_every_process_of_a_cluster_knows_its_three_servers_and_how_many_copies_a_log_has() -> None:
    services, cluster = compose_services(), compose_services(CLUSTER_FILE)
    own = services["credentials"]["image"]
    processes = {
        name
        for name, service in services.items()
        if service["image"] == own and "bus" in service["networks"] and name != "nats"
    }

    assert {"scheduler", "scaler", "pointsman", "recorder-gpu"} < processes
    for name in sorted(processes | {"scheduler-2", "ingress-2"}):
        environment = cluster.get(name, {}).get("environment", {})
        servers = environment.get("POINTSMAN_NATS", "").split(",")
        assert (name, servers) == (name, ["nats://nats:4222", "nats://nats-2:4222", "nats://nats-3:4222"])
        assert (name, environment.get("POINTSMAN_LOG_REPLICAS")) == (name, "3")


def test_the_ingresses_of_a_cluster_differ_in_their_names() -> None:
    cluster = compose_services(CLUSTER_FILE)
    names = [cluster[service]["environment"].get("POINTSMAN_NAME") for service in ("ingress", "ingress-2")]

    assert all(names)
    assert len(set(names)) == len(names)


def test_the_pool_on_npus_has_the_blocks_of_its_engines() -> None:
    services, ascend = compose_services(), compose_services(ASCEND_FILE)
    processes = [service.name for service in own_services() if service.name.endswith("-gpu")]
    engines = [name for name in services if name.startswith("engine-gpu")]

    assert len(processes) == 4
    assert {ascend[name]["environment"]["POINTSMAN_BLOCK_TOKENS"] for name in processes} == {"128"}
    for name in engines:
        assert ascend[name]["command"] == [*services["engine-gpu-0"]["command"], "--block-size=128"]


def test_haproxy_bounds_its_files_and_asks_for_no_more_than_the_host_allows() -> None:
    """https://docs.haproxy.org/2.6/configuration.html#fd-hard-limit: maxconn follows from it and from the system's limit.
    A larger `ulimits` than the Docker daemon's own keeps the container from starting."""
    settings = (CLUSTER_FILE.parent / "haproxy/haproxy.cfg").read_text()
    (files,) = re.findall(r"^    fd-hard-limit (\d+)", settings, re.MULTILINE)

    assert 10_000 <= int(files) <= 100_000
    assert not re.search(r"^    maxconn", settings, re.MULTILINE)
    assert "ulimits" not in compose_services(CLUSTER_FILE)["haproxy"]


def test_haproxy_has_the_configuration_of_the_page_where_names_and_networks_do_not_differ() -> None:
    page = (ROOT / "docs/ingress.md").read_text()
    (documented,) = re.findall(r"```haproxy\n(.*?)```", page, re.DOTALL)
    shipped = directives((CLUSTER_FILE.parent / "haproxy/haproxy.cfg").read_text())

    missing = [
        words
        for words in directives(documented)
        if not any(words[0] == ours[0] and set(words) <= set(ours) for ours in shipped) and words[0] != "server"
    ]

    assert missing == []


def test_haproxy_sends_requests_to_the_port_of_every_ingress_and_asks_its_admin_port() -> None:
    servers = [
        words[1:5]
        for words in directives((CLUSTER_FILE.parent / "haproxy/haproxy.cfg").read_text())
        if words[0] == "server"
    ]
    ingresses = {**compose_services(), **compose_services(CLUSTER_FILE)}

    expected = [name for name in ingresses if name.startswith("ingress") and not name.endswith("-gpu")]
    assert servers == [[name, f"{name}:8080", "port", "8081"] for name in expected]


def directives(configuration: str) -> list[list[str]]:
    lines = (line.partition("#")[0].split() for line in configuration.splitlines())
    return [words for words in lines if words]


def test_who_asks_others_or_itself_by_http_does_so_without_the_proxies_of_dockers_client() -> None:
    """Compose hands them to each container, whose own variables count before them. requests knows ALL_PROXY, too."""
    services = {**compose_services(), **compose_services(CLUSTER_FILE)}
    foreign = {
        name
        for name, service in services.items()
        if re.search("wget|urllib", str(service.get("healthcheck", {}).get("test")))
    }
    own = {service.name for service in own_services()}

    assert {"prometheus", "grafana", "haproxy", "engine-gpu-0"} <= foreign
    for name in foreign | own:
        environment = (compose_services().get(name) or services[name])["environment"]
        assert {environment.get(variable) for variable in ("HTTP_PROXY", "http_proxy")} == {""}, name
    for name in own:
        environment = compose_services()[name]["environment"]
        assert {environment.get(variable) for variable in ("ALL_PROXY", "all_proxy")} == {""}, name


def test_nobody_signs_in_to_grafana() -> None:
    """https://grafana.com/docs/grafana/latest/setup-grafana/configure-grafana: by default admin/admin does."""
    settings = compose_services()["grafana"]["environment"]

    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_two_engines_on_gpus_have_one_each() -> None:
    engines = [service for name, service in compose_services().items() if name.startswith("engine-gpu")]
    reserved = [engine["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for engine in engines]

    assert reserved == [["0"], ["1"]]


@pytest.mark.parametrize(
    ("listening", "asked"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1",) * 2, ("::", "::1"), ("::1",) * 2]
)
def test_the_health_check_finds_a_process_wherever_it_listens(listening: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with socket.create_server((listening, 0), family=family) as server:
        assert (asked, server.getsockname()[1]) in deploy_script("healthcheck.py").listeners()


@pytest.mark.parametrize("ready", [True, False])
def test_a_health_check_prints_what_the_process_answers(*, ready: bool) -> None:
    """Docker keeps it, so that `docker inspect` says why a container is unhealthy."""
    body = b'{"missing": {"nats": "no connection"}}'
    head = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (200 if ready else 503, len(body))
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = [sys.executable, "deploy/healthcheck.py", "/readyz", str(server.getsockname()[1])]
        with subprocess.Popen(check, cwd=ROOT, stdout=subprocess.PIPE) as process:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head)
                connection.sendall(body)  # in two parts
            said, _ = process.communicate(timeout=60)

    assert (process.returncode == 0, said.strip()) == (ready, body)


def test_a_health_check_that_takes_too_long_ends_itself() -> None:
    stuck = (
        "import sys, time; from tests.support.deploy_scripts import deploy_script;"
        "check = deploy_script('healthcheck.py'); check.listeners = lambda: time.sleep(600); sys.argv[1:] = ['/health'];"
        "check.main()"
    )

    assert subprocess.run([sys.executable, "-c", stuck], cwd=ROOT, timeout=60).returncode == -signal.SIGALRM


def names_on_networks(name: str, service: dict[str, Any]) -> set[str]:
    networks = service["networks"]
    aliases = networks.values() if isinstance(networks, dict) else ()
    return {name} | {alias for network in aliases for alias in network["aliases"]}


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
    assert ("user" in service) == (name in ("credentials", "docker-gate"))
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert "privileged" not in service
    assert ("docker.sock" in str(service.get("volumes"))) == (name == "docker-gate")


def test_an_engine_reaches_neither_nats_nor_the_engines_of_another_pool() -> None:
    networks = {name: set(service["networks"]) for name, service in compose_services().items()}
    engines = {name for name in networks if name.startswith("engine")}

    for engine in engines:
        reached = {name for name, own in networks.items() if own & networks[engine]} - {engine}
        alike = {name for name in engines if networks[name] == networks[engine]}
        assert reached - alike <= {name for name in networks if name.startswith(("worker", "ingress"))}
    assert networks["engine"].isdisjoint(networks["engine-gpu-0"])
    assert networks["nats"] == {"bus"}


def test_the_gate_to_docker_is_reached_by_the_scaler_alone_and_reaches_nobody() -> None:
    services = compose_services()
    near = {name for name, service in services.items() if "docker" in service["networks"]}

    assert near == {"docker-gate", "scaler"}
    assert services["docker-gate"]["networks"] == ["docker"]


def test_commands_of_people_wait_for_nothing() -> None:
    assert "depends_on" not in compose_services()["pointsman"]


def test_nobody_waits_for_a_service_that_is_not_there_or_has_no_health_check() -> None:
    services = compose_services()
    for service in services.values():
        for awaited, how in service.get("depends_on", {}).items():
            once = services[awaited]["restart"] == "no"
            assert how["condition"] == ("service_completed_successfully" if once else "service_healthy")
            assert services[awaited]["healthcheck"].get("disable", False) == once
