"""The settings file knows the tables and keys of every process, so what it does not know is misspelt."""

from pathlib import Path

import click
import pytest

from pointsman.runtime import settings_file
from pointsman.runtime.settings import CONFIG
from pointsman.runtime.settings_file import REMOVED, SETTINGS, TABLES, read_settings_file
from tests.support.settings_types import COMMANDS, process_settings, settable

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
