"""Processes with other constants than ours: nobody waits half a minute in a test for what seldom happens in a fleet."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest


def patch_processes(monkeypatch: pytest.MonkeyPatch, directory: Path, constants: Mapping[str, float]) -> None:
    """Each Python that is started from now on sets them as it starts. By name with its module."""
    patched = directory / "patched"
    patched.mkdir()
    lines = [f"import {name.rpartition('.')[0]}\n{name} = {value!r}\n" for name, value in constants.items()]
    (patched / "sitecustomize.py").write_text("".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(patched), prepend=os.pathsep)
