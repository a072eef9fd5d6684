"""deploy/systemd: systemd takes the units and confines them, and our processes take what the units tell them."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from pointsman.runtime.settings import ENVIRONMENT_PREFIX, FILE_SUFFIX, options
from pointsman_cli.console.command import console_command
from pointsman_cli.up.scripts import settings_type_of
from pointsman_ingress.settings import IngressSettings
from tests.support.systemd import UNITS, Unit, make_root, units

EXPOSURE_MAX = 20
"""Tenths, of systemd's 10."""
OWN = [unit for unit in units() if unit.name not in ("pointsman-nats", "pointsman-console")]
OWN_SEEDS = {"worker": "workers/default"}
NOT_CALLED_A_SETTING = {"POINTSMAN_CONFIG", f"POINTSMAN_SECRET{FILE_SUFFIX}"}


@pytest.fixture(scope="module")
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd here")
    return program


def test_there_is_a_unit_for_each_service() -> None:
    assert {unit.name.removeprefix("pointsman-") for unit in units()} == {
        *("console", "ingress", "nats", "rebalancer", "recorder", "scaler", "scheduler", "worker")
    }


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.name)
def test_a_unit_gives_its_process_settings_that_it_takes(
    unit: Unit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = Path(unit.command[0]).name
    assert script == unit.name
    known = options(settings_type_of(script))
    (tmp_path / "secret").write_text("a secret")
    for name, value in unit.variables.items():
        monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    content = tomllib.loads((UNITS / "pointsman.toml").read_text())
    own = content[unit.name.removeprefix("pointsman-")]
    shared = {name: value for name, value in content.items() if not isinstance(value, dict)}
    command = click.Command(script, params=list(known))
    names = {option.name for option in known}

    accepted = command.make_context(script, unit.command[1:], default_map=shared | own).params

    assert set(unit.variables) - NOT_CALLED_A_SETTING <= {ENVIRONMENT_PREFIX + str(name).upper() for name in names}
    assert set(own) <= names
    assert accepted["log_replicas"] == 3
    assert accepted["secret"] == "a secret"
    assert Path(accepted["nats_credentials"]).name in unit.credentials


@pytest.mark.parametrize("unit", OWN, ids=lambda unit: unit.name)
def test_a_process_has_no_credentials_but_the_secret_and_its_own(unit: Unit) -> None:
    role = unit.name.removeprefix("pointsman-")

    assert unit.credentials == {
        "secret": "/etc/pointsman/credentials/secret",
        f"{role}.nk": f"/etc/pointsman/credentials/{OWN_SEEDS.get(role, role)}.nk",
    }


def test_the_console_reads_its_table_and_has_only_its_own_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (unit,) = [unit for unit in units() if unit.name == "pointsman-console"]
    for name, value in unit.variables.items():
        monkeypatch.setenv(name, value.replace("%d", str(tmp_path)))
    monkeypatch.setenv("POINTSMAN_CONFIG", str(UNITS / "pointsman.toml"))

    accepted = console_command.make_context("console", unit.command[2:]).params

    assert unit.command[1] == "console"
    assert (accepted["host"], accepted["port"]) == ("127.0.0.1", 8090)
    assert accepted["nats"].startswith("nats://127.0.0.1:4222,")
    assert unit.credentials == {"console.nk": "/etc/pointsman/credentials/console.nk"}


def test_an_ingress_has_the_time_that_it_takes_to_drain() -> None:
    (ingress,) = [unit for unit in OWN if unit.name == "pointsman-ingress"]
    defaults = IngressSettings()

    granted = int(ingress.settings["TimeoutStopSec"][-1])

    assert granted >= defaults.lame_duck_seconds + defaults.drain_seconds_max + 15
    assert ingress.settings["KillMode"] == ["mixed"]


def test_systemd_finds_nothing_wrong(analyze: str, tmp_path: Path) -> None:
    root = make_root(tmp_path)
    names = [f"{unit.name}.service" for unit in units()]

    found = subprocess.run([analyze, "verify", f"--root={root}", *names], capture_output=True, text=True, check=False)

    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_a_unit_is_confined(unit: Unit, analyze: str, tmp_path: Path) -> None:
    root = make_root(tmp_path)
    options = ["--offline=true", f"--root={root}", f"--threshold={EXPOSURE_MAX}"]

    found = subprocess.run(
        [analyze, "security", *options, f"{unit.name}.service"], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stdout[-2000:]
