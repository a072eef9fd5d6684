"""Finds installed console scripts."""

import sysconfig
from pathlib import Path


class MissingScriptError(Exception):
    """A console script is not where Python installs them."""


def console_script(name: str) -> Path:
    """Raises MissingScriptError."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        message = f"{name} is not in {path.parent}; install Pointsman into this Python again (make setup)"
        raise MissingScriptError(message)
    return path
