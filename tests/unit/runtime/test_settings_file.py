"""The settings file knows the tables and keys of every process, so what it does not know is misspelt."""

import re
from pathlib import Path

import click
import pytest

from pointsman.runtime import environment_names, settings_file
from pointsman.runtime.environment_names import unknown_variables, warn_of_variables
from pointsman.runtime.settings import CONFIG
from pointsman.runtime.settings_file import REMOVED, SETTINGS, TABLES, read_settings_file
from tests.support.settings_types import COMMANDS, process_settings, settable
from tests.unit.runtime.conftest import LinesOf

ROOT = Path(__file__).parents[3]
FILES = ("deploy/compose/pointsman.toml", "deploy/image.toml", "deploy/systemd/pointsman.toml")


def test_each_process_knows_the_tables_and_settings_of_all_commands() -> None:
    known = Path(settings_file.__file__).with_name("process_settings.json").read_text()

    assert known == process_settings(), "run: make settings"
    assert frozenset(COMMANDS) == TABLES
    assert {name for command in COMMANDS.values() for name in settable(command)} - {CONFIG} == SETTINGS


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("file", FILES)
def test_each_command_takes_the_files_that_we_ship(file: str, table: str) -> None:
    read_settings_file(ROOT / file, table, settable(COMMANDS[table]))


SERVICES = sorted(TABLES - {"console", "up"})
OF_ITS_WORKERS = {"secret"}
"""Of a scaler, which gives all that a worker needs to those that it starts."""


@pytest.mark.parametrize("table", SERVICES)
def test_a_service_reads_each_of_its_settings(table: str) -> None:
    own, runtime = (
        "".join(file.read_text() for file in (ROOT / folder).rglob("*.py"))
        for folder in (f"services/{table.replace('-', '_')}", "shared/pointsman/runtime")
    )
    unread = {
        name
        for name in settable(COMMANDS[table]) - {CONFIG}
        if not re.search(rf"\.{name}\b", own) and not re.search(rf"\b(settings|self)\.{name}\b", runtime)
    }

    assert unread == (OF_ITS_WORKERS if table == "scaler" else set())


@pytest.mark.parametrize("table", SERVICES)
def test_what_is_set_for_the_whole_deployment_reaches_each_service_that_has_it(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('block_tokens = 32\npool = "main"\n')
    monkeypatch.setenv("POINTSMAN_SECRET", "of the deployment")
    accepted = COMMANDS[table].make_context(table, ["--config", str(file)]).params

    told = {"block_tokens": 32, "pool": "main", "secret": "of the deployment"}
    assert {name: accepted[name] for name in told if name in accepted}.items() <= told.items()
    assert unknown_variables(["POINTSMAN_SECRET"]) == []


@pytest.mark.parametrize("table", sorted(TABLES - {"up"}))
def test_a_variable_that_wins_over_the_processs_own_table_is_named(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines_of: LinesOf
) -> None:
    lines = lines_of(environment_names)
    file = tmp_path / "fleet.toml"
    file.write_text(f'[{table}]\nport = 9000\nhost = "0.0.0.0"\n')
    for variable in ("POINTSMAN_PORT", "POINTSMAN_LOG_LEVEL"):  # the second outranks no key
        with COMMANDS[table].make_context(table, ["--config", str(file)]):
            warn_of_variables()
        monkeypatch.setenv(variable, "8080" if variable == "POINTSMAN_PORT" else "debug")
    with COMMANDS[table].make_context(table, ["--config", str(file)]):
        warn_of_variables()

    told = {"event": "settings_overridden", "log_level": "warning", "file": str(file), "by": "POINTSMAN_PORT"}
    assert lines == [told, told]


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_is_refused_and_told_what_holds_now(name: str, tmp_path: Path) -> None:
    assert name not in SETTINGS
    for content in (f"{name} = 2\n", f"[scheduler]\n{name} = 2\n"):
        file = tmp_path / "fleet.toml"
        file.write_text(content)

        with pytest.raises(click.BadParameter, match=f"setting {name}; it was removed: {REMOVED[name]}"):
            COMMANDS["scheduler"].make_context("scheduler", ["--config", str(file)])


@pytest.mark.parametrize("table", sorted(TABLES))
def test_each_command_refuses_a_misspelt_table_and_a_misspelt_key(table: str, tmp_path: Path) -> None:
    for content in ("[ingres]\nrequire_keys = true\n", "require_key = true\n", "[schedulerr]\n"):
        file = tmp_path / "fleet.toml"
        file.write_text(content)

        with pytest.raises(click.BadParameter, match="did you mean"):
            COMMANDS[table].make_context(table, ["--config", str(file)])
