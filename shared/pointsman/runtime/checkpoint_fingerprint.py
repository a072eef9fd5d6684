"""Fingerprints that tell whether a checkpoint equals a fold of this log from its first entry."""

from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import msgspec

from pointsman.ports import LogEntry
from pointsman.state.checkpoint import SCALARS, attributes_of
from pointsman.state.state import State
from pointsman.state.trackers.base import Tracker

VERSION_DIGITS_MAX = 9


def entry_digest(entry: LogEntry) -> str:
    return blake2b(entry.subject.encode() + b"\x00" + entry.payload, digest_size=16).hexdigest()


def checkpoint_form(empty_state: State) -> str:
    """Fold version, then a digest of pool settings, trackers and their settings. Not of the code: releases with the same
    FOLD_VERSION fold alike (tests/golden/test_fold.py), and `decode_state` judges attributes."""
    settings = empty_state.settings
    chosen = [tracker for tracker in empty_state.trackers if _is_chosen(tracker)]
    fold = [asdict(settings), [[type(tracker).__qualname__, list(_settings(tracker))] for tracker in chosen]]
    digest = blake2b(msgspec.json.encode(fold, order="sorted"), digest_size=16).hexdigest()
    return f"{settings.fold_version}.{digest}"


def fold_version(form: str) -> int | None:
    """Of a checkpoint; None: of a release whose checkpoints were bound to its code."""
    version, dot, _ = form.partition(".")
    return int(version) if dot and version.isdecimal() and len(version) <= VERSION_DIGITS_MAX else None


def _is_chosen(part: object) -> bool:
    """By a policy; every State has the others."""
    return type(part).__module__.startswith(Tracker.__module__.rpartition(".")[0])


def _settings(tracker: object) -> Iterator[Any]:
    """Names of its attributes, with the values that a constructor is told; what it learns is empty still."""
    for name, value in attributes_of(tracker).items():
        parts = value if isinstance(value, tuple) else (value,)
        if all(type(part) in SCALARS for part in parts):
            yield name, [repr(part) for part in parts]
        elif _is_chosen(value):
            yield name, list(_settings(value))
        else:
            yield name
