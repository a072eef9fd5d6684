"""Finds installed console scripts, and the settings of those that run a service."""

import sysconfig
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from pointsman.runtime.settings import ProcessSettings


class MissingScriptError(Exception):
    """A console script is not where Python installs them."""


def console_script(name: str) -> Path:
    """Raises MissingScriptError."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise MissingScriptError(
            f"{name} is not in {path.parent}; install Pointsman into this Python again (make setup)"
        )
    return path


def settings_type_of(script: str) -> type[ProcessSettings]:
    """The one dataclass of a process in the `settings` module beside the script's. Services are found by their scripts,
    since commands do not import them. Raises MissingScriptError."""
    for entry in entry_points(group="console_scripts", name=script):
        module = import_module(f"{entry.module.rpartition('.')[0]}.settings")
        (found,) = [
            member
            for member in vars(module).values()
            if isinstance(member, type) and issubclass(member, ProcessSettings) and member.__module__ == module.__name__
        ]
        return found
    raise MissingScriptError(f"{script} is not installed; install Pointsman into this Python again (make setup)")
