"""docker-compose.yml as a test reads it: with its defaults filled in, and each service's settings beside it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, FILE_SUFFIX, ProcessSettings, command
from pointsman_cli.up.scripts import settings_type_of

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
CLUSTER_FILE = ROOT / "deploy/compose/cluster.yml"
ASCEND_FILE = ROOT / "deploy/compose/ascend.yml"
SETTINGS_FILES = ("deploy/image.toml", "deploy/compose/pointsman.toml")
"""In a container both are in /etc/pointsman, in this order."""
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?(?P<kind>[-?])(?P<rest>[^}]*))?\}")


@dataclass(frozen=True)
class OwnService:
    """A service that runs one of our console scripts."""

    name: str
    script: str
    flags: dict[str, str]
    environment: dict[str, str]

    @property
    def variables(self) -> dict[str, str]:
        return {name: value for name, value in self.environment.items() if name.startswith(ENVIRONMENT_PREFIX)}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Knows Compose's `!reset`."""


_Loader.add_constructor("!reset", lambda _loader, _node: None)


def compose_services(file: Path = COMPOSE_FILE) -> dict[str, dict[str, Any]]:
    """The services of one file, merge keys resolved and variables at their defaults; required ones become `required`."""
    content = VARIABLE.sub(_default, file.read_text())
    services: dict[str, dict[str, Any]] = yaml.load(content, _Loader)["services"]
    return services


def own_services() -> list[OwnService]:
    return [
        OwnService(
            name=name,
            script=service["command"][0],
            flags=dict(argument.split("=", 1) for argument in service["command"][1:]),
            environment={key: str(value) for key, value in service["environment"].items() if value is not None},
        )
        for name, service in compose_services().items()
        if service.get("command", [""])[0].startswith("pointsman-")
    ]


def settings_of(service: OwnService, monkeypatch: pytest.MonkeyPatch, *, config: Path | None = None) -> ProcessSettings:
    """What the service reads from its command line, its variables and `config`; secrets from a file that is there."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    if config is not None:
        monkeypatch.setenv(ENVIRONMENT_PREFIX + "CONFIG", str(config))
    read: list[ProcessSettings] = []
    flags = [f"{flag}={value}" for flag, value in service.flags.items()]
    table = service.script.removeprefix("pointsman-")
    with NamedTemporaryFile() as file:
        Path(file.name).write_text("a secret\n")
        for name, value in service.variables.items():
            monkeypatch.setenv(name, file.name if name.endswith(FILE_SUFFIX) else value)
        command(settings_type_of(service.script), name=service.script, table=table)(read.append).main(
            flags, standalone_mode=False
        )
    return read[0]


def _default(variable: re.Match[str]) -> str:
    return (variable["rest"] or "") if variable["kind"] == "-" else "required"
