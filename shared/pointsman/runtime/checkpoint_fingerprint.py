"""Fingerprints that tell whether a checkpoint equals a fold of this log from its first entry."""

from functools import cache
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from pointsman.ports import LogEntry
from pointsman.state.checkpoint import encode_state
from pointsman.state.state import State


def entry_digest(entry: LogEntry) -> str:
    return blake2b(entry.subject.encode() + b"\x00" + entry.payload, digest_size=16).hexdigest()


def checkpoint_form(empty_state: State) -> str:
    """Covers the fold code, pool settings, trackers and their settings."""
    return f"{fold_form()}.{blake2b(encode_state(empty_state), digest_size=16).hexdigest()}"


def fold_form() -> str:
    """Covers the fold code: for who keeps other trackers than the writer."""
    return blake2b(_fold_code(), digest_size=16).hexdigest()


def is_of_this_fold(form: str) -> bool:
    return form.partition(".")[0] == fold_form()


def fold_modules() -> list[Traversable]:
    """Includes `primitives`, whose bounds decide which entries are dead letters."""
    modules = [files("pointsman").joinpath("primitives.py")]
    for package in ("pointsman.state", "pointsman.state.trackers", "pointsman.contracts"):
        modules += sorted(files(package).iterdir(), key=lambda found: found.name)
    return [module for module in modules if module.name.endswith(".py")]


@cache
def _fold_code() -> bytes:
    code = blake2b(digest_size=16)
    for module in fold_modules():
        code.update(module.name.encode() + b"\x00" + module.read_bytes())
    return code.digest()
