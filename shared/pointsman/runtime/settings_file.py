"""The settings file of `--config`. All processes share one, so each knows the tables and keys of all and refuses others:
a misspelt key would leave a default in force, such as an ingress without keys. It does not read values; click does."""

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import click

_KNOWN = json.loads(Path(__file__).with_name("process_settings.json").read_text())
"""Written by `make settings` from the commands of all processes, which cannot import each other's."""
TABLES: frozenset[str] = frozenset(_KNOWN["tables"])
SETTINGS: frozenset[str] = frozenset(chain.from_iterable(_KNOWN["tables"].values()))
"""Of all processes; those that a process does not have are for others."""
REMOVED: Mapping[str, str] = {
    "report_seconds": "workers report every second",
    "scaler_lease_seconds": "another scaler takes over after 3 s",
    "waiter_seconds": "a request is given up 3 s after its ingress named it last",
}
"""Settings of earlier versions, with what holds now."""
SECRETS: frozenset[str] = frozenset(_KNOWN["secrets"])
"""Settings that may stand in a file of their own."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a file says to one process: in its table, and at the top for every process that has the setting."""

    top: Mapping[str, Any]
    table: Mapping[str, Any]

    @property
    def merged(self) -> dict[str, Any]:
        return {**self.top, **self.table}


def read_settings_file(path: Path, table: str, known: Collection[str]) -> FileSettings:
    """`known`: settings of the process. Of a directory all `*.toml` count, the last wins. Raises click.BadParameter."""
    top: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for file in sorted(path.glob("*.toml")) if os.path.isdir(path) else [path]:  # noqa: PTH112 - a name may be too long
        content = _content(file)
        for key, value in content.items():
            _check(file, key, value, tables=TABLES | {table}, settings=SETTINGS.union(known))
        found = content.get(table)
        mine = found if isinstance(found, dict) else {}
        for key in mine:
            if key not in known:
                _refuse(file, f"[{table}] has no setting {key}", meant(key, known) or "see --help for those there are")
        top |= {key: value for key, value in content.items() if key in known and not isinstance(value, dict)}
        own |= mine
    return FileSettings(top, own)


def _check(file: Path, key: str, value: object, *, tables: Collection[str], settings: Collection[str]) -> None:
    if isinstance(value, dict):
        if key not in tables:
            known = ", ".join(f"[{name}]" for name in sorted(tables))
            _refuse(file, f"there is no table [{key}]", meant(key, tables, "[{}]") or f"there are {known}")
    elif key in tables and key not in settings:
        _refuse(file, f"{key} is a table", f"write [{key}] on a line of its own, its settings below it")
    elif key not in settings:
        _refuse(file, f"no process has a setting {key}", meant(key, settings) or "see --help of the processes")


def meant(key: str, known: Iterable[str], shown: str = "{}") -> str:
    """What was probably meant, or what became of a removed setting; empty if neither is known."""
    if key.lower() in REMOVED:
        return f"it was removed: {REMOVED[key.lower()]}"
    close = get_close_matches(key, sorted(known), n=1)
    return f"did you mean {shown.format(close[0])}?" if close else ""


def _refuse(file: Path, what: str, what_to_do: str) -> None:
    raise click.BadParameter(f"{file}: {what}; {what_to_do}")


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise click.BadParameter(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} is not valid TOML: {error}") from error
