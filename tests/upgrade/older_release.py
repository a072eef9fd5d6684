"""The release before this one, installed for itself: its packages from its own wheel, its dependencies from here."""

import shutil
import site
import subprocess
import sys
from pathlib import Path

BEFORE = "461fb369"
"""The last commit before the wire had a version. Raise it with each release: two that follow each other may be mixed."""
HERE = Path(__file__).parents[2]
ENVIRONMENTS = HERE / ".tools" / "releases"


def is_reachable(commit: str = BEFORE) -> bool:
    """A shallow checkout does not have it."""
    found = subprocess.run(
        ["git", "-C", HERE, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False
    )
    return found.returncode == 0


def python_of(commit: str = BEFORE) -> Path:
    """The interpreter of an environment with that release; made on first use, some ten seconds."""
    environment = ENVIRONMENTS / commit
    python = environment / "bin" / "python"
    if not (environment / "ready").exists():
        shutil.rmtree(environment, ignore_errors=True)
        source = environment / "source"
        source.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", HERE, "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        wheels = environment / "wheels"
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source], check=True)
        packages = Path(site.getsitepackages([str(environment)])[0])
        subprocess.run([*pip, "install", "--no-deps", "--target", packages, *wheels.glob("*.whl")], check=True)
        (packages / "dependencies.pth").write_text(f"{site.getsitepackages()[0]}\n")
        (environment / "ready").touch()
    return python
