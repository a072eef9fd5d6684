"""deploy/systemd as a test reads it: its units, and a root directory in which systemd-analyze finds what they name."""

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pointsman.runtime.settings import ENVIRONMENT_PREFIX

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
TARGETS = ("sysinit", "basic", "multi-user", "network-online", "shutdown")


@dataclass(frozen=True)
class Unit:
    """`settings`: values of each key of [Service], the drop-in's last, as systemd merges them."""

    name: str
    settings: dict[str, list[str]]

    @property
    def command(self) -> list[str]:
        return self.settings["ExecStart"][-1].split()

    @property
    def environment(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.settings["Environment"])

    @property
    def variables(self) -> dict[str, str]:
        return {name: value for name, value in self.environment.items() if name.startswith(ENVIRONMENT_PREFIX)}

    @property
    def credentials(self) -> dict[str, str]:
        return dict(text.split(":", 1) for text in self.settings["LoadCredential"])


def units() -> list[Unit]:
    return [Unit(file.stem, _service([file, *drop_ins(file.name)])) for file in sorted(UNITS.glob("*.service"))]


def drop_ins(unit: str) -> list[Path]:
    """Ours, in the order in which systemd applies them."""
    found = [file for of in ("pointsman-.service.d", f"{unit}.d") for file in (UNITS / of).glob("*.conf")]
    return sorted(found, key=lambda file: file.name)


def make_root(directory: Path) -> Path:
    """A root file system with the units, and programs that do nothing at the places that they name."""
    installed = directory / "etc/systemd/system"
    shutil.copytree(UNITS, installed)
    for target in TARGETS:
        (installed / f"{target}.target").write_text("[Unit]\nDescription=part of the system\n")
    programs = [Path(unit.command[0]) for unit in units()]
    for program in (*programs, Path("/bin/kill")):
        file = directory / program.relative_to("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    return directory


def _service(files: list[Path]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for line in file.read_text().splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found[name].append(value)
    return found
