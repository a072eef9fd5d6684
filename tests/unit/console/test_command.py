"""What the console takes of a deployment's files, and as whom it reads and acts."""

import shutil
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency
from click.testing import CliRunner

from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.command_client import person
from pointsman_cli.console import command
from pointsman_cli.console.command import console_command
from tests.support.compose import ROOT, SETTINGS_FILES, compose_services

COMPONENT = ROOT / "deploy/kubernetes/components/console/console.yaml"
SETTINGS = ROOT / "deploy/kubernetes/base/settings.yaml"


def context_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> click.Context:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return console_command.make_context("console", [])


def fleet_of(context: click.Context) -> FleetSettings:
    names = FleetSettings.__dataclass_fields__
    return FleetSettings(**{name: value for name, value in context.params.items() if name in names})


def test_in_compose_it_reads_as_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service = compose_services()["console"]
    for number, file in enumerate(SETTINGS_FILES):
        shutil.copy(ROOT / file, tmp_path / f"{number}.toml")
    environment = {name: str(value) for name, value in service["environment"].items() if value is not None}

    context = context_of(environment | {"POINTSMAN_CONFIG": str(tmp_path)}, monkeypatch)
    settings = fleet_of(context)

    assert service["command"] == ["pointsman", "console"]
    assert settings.nats == "nats://nats:4222"
    assert (context.params["host"], context.params["port"]) == ("0.0.0.0", 8080)
    assert person(settings) == BusUser(BusRole.CONSOLE)


def test_in_kubernetes_it_reads_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    container = yaml.safe_load(COMPONENT.read_text())["spec"]["template"]["spec"]["containers"][0]
    shared = next(yaml.safe_load_all(SETTINGS.read_text()))["data"]
    own = {variable["name"]: variable["value"] for variable in container["env"]}

    context = context_of(shared | own, monkeypatch)
    settings = fleet_of(context)

    assert container["command"] == ["pointsman", "console"]
    assert settings.nats == "nats://pointsman-nats:4222"
    assert context.params["port"] == container["ports"][0]["containerPort"]
    assert context.params["log_format"] == "json"
    assert person(settings) == BusUser(BusRole.CONSOLE)


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, ("warning", "text")),
        ({"POINTSMAN_LOG_LEVEL": "debug", "POINTSMAN_LOG_FORMAT": "json"}, ("debug", "json")),
    ],
)
def test_it_logs_as_the_deployment_says(
    environment: dict[str, str], chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured: list[tuple[str, str]] = []
    monkeypatch.setattr(command, "configure_logging", lambda *how: configured.append(how))
    monkeypatch.setattr(command, "run", lambda main: None)

    ran = CliRunner().invoke(console_command, ["--nats", "nats://127.0.0.1:1"], env=environment)

    assert (ran.exit_code, configured) == (0, [chosen]), ran.output


@pytest.mark.parametrize(
    ("reads_as", "operator", "acts_as"),
    [
        ("console.nk", None, None),
        ("console.nk", "alice.nk", "alice"),
        ("bob.nk", None, "bob"),
        ("reader.nk", None, None),
    ],
)
def test_it_acts_only_as_an_operator(reads_as: str, operator: str | None, acts_as: str | None) -> None:
    settings = FleetSettings(nats="nats://elsewhere:4222", nats_credentials=f"/run/{reads_as}")

    acting = command._acting("nats://elsewhere:4222", settings, Path(operator) if operator else None)

    assert (acting.actor if acting else None) == acts_as


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "-"], "name a file"),
        (["a.pmlog", "--from", "b.pmlog"], "choose one log"),
        (["no-such-file.pmlog"], "no-such-file.pmlog"),
        (["--nats", "nats://127.0.0.1:1", "--until", "9"], "--until is for a recorded one"),
        (["--admin-token-file", "{short}", "{bundle}"], "at least 16 characters"),
        (["--admin-token-file", "{short}.not-there", "{bundle}"], "not-there"),
    ],
)
def test_what_cannot_be_shown_is_told_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", lambda main: None)
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "bundle").write_text("{}\n")
    places = {"short": str(tmp_path / "short"), "bundle": str(tmp_path / "bundle")}

    ran = CliRunner().invoke(console_command, [text.format(**places) for text in arguments])

    assert ran.exit_code != 0
    assert said in ran.output
    assert "Traceback" not in ran.output
