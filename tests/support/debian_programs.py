"""Programs that tests need and only Debian packages (promtool, kubectl, kustomize, a browser), unpacked below .tools/:
without root, without the system's package lists, from the mirror that this machine uses."""

import fcntl
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".tools"
SOURCES = ("/etc/apt/sources.list.d/*.sources", "/etc/apt/sources.list")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = re.compile(r"^(?:URIs:\s*|deb (?:\[[^]]*\] )?)(\S+)", re.MULTILINE)
INSTALL_SECONDS_MAX = 240
C_LIBRARY = "libc6_"
"""Belongs to the dynamic linker of this machine, so it must be this machine's."""


def debian_program(name: str, package: str, suite: str) -> Path:
    """`suite`: of Debian, "bookworm" for instance. Skips the test where there is no apt."""
    directory = unpacked(package, suite)
    found = [path for folder in ("bin", "sbin") for path in directory.glob(f"usr/{folder}/{name}")]
    assert found, f"{package} of Debian {suite} has no {name}"
    return found[0]


def unpacked(package: str, suite: str, *, libraries: Sequence[str] | None = None) -> Path:
    """`libraries`: packages to unpack beside it, and all that they and it depend on, but for the C library. Without them
    the program must find its libraries on this machine."""
    directory = TOOLS / f"{package}-{suite}"
    TOOLS.mkdir(exist_ok=True)
    with (TOOLS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _unpack(package, suite, directory, libraries)
    return directory


def _unpack(package: str, suite: str, directory: Path, libraries: Sequence[str] | None) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip(f"{package} comes from Debian, and there is no apt here")
    draft = directory.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    if libraries is None:
        apt(suite, "download", package, cwd=draft)
    else:
        (draft / "partial").mkdir()
        only_download = ("--download-only", "--no-install-recommends", f"-oDir::Cache::archives={draft}")
        apt(suite, "install", *only_download, package, *libraries, cwd=draft)
    for archive in draft.glob("*.deb"):
        if not archive.name.startswith(C_LIBRARY):
            subprocess.run(["dpkg-deb", "-x", archive, draft], check=True, timeout=INSTALL_SECONDS_MAX)
        archive.unlink()
    draft.rename(directory)


def apt(suite: str, *command: str, cwd: Path, sources: bool = False) -> None:
    """apt-get with lists of its own, which knows of no installed package. `sources`: of source packages too."""
    state = TOOLS / (f"apt-{suite}-sources" if sources else f"apt-{suite}")
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    kinds = ("deb", "deb-src") if sources else ("deb",)
    listed = state / "sources.list"
    listed.write_text("".join(f"{kind} [signed-by={KEYRING}] {_mirror()} {suite} main\n" for kind in kinds))
    (state / "status").touch()
    where = {
        "Dir::Etc::sourcelist": listed,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Sandbox::User": "",
    }
    program = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in where.items())]
    for step in ([*program, "update"], [*program, *command]):
        subprocess.run(step, cwd=cwd, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)


def _mirror() -> str:
    files = sorted(path for pattern in SOURCES for path in Path("/").glob(pattern[1:]))
    found: list[str] = [name for path in files for name in MIRROR.findall(path.read_text()) if "security" not in name]
    if not found:
        pytest.skip("no Debian mirror is known here")
    return found[0]
