"""What is installed: locked with hashes, above known vulnerabilities, and in the image only what runs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.deploy_scripts import deploy_script

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "deploy" / name for name in ("requirements.txt", "requirements-runtime.txt", "requirements-build.txt")]
RUNTIME = LOCKS[1]
BUILD_TOOLS = {"build", "hatchling", "pip", "pip-tools", "setuptools", "wheel", "pluggy", "pytest", "mypy", "ruff"}
PINNED = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;]+)", re.MULTILINE)
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
ROOT_STAGE, FINAL_STAGE = DOCKERFILE.split("AS root\n")[1].split("FROM scratch\n")


def pinned(lock: Path) -> dict[str, str]:
    return {found["name"]: found["version"] for found in PINNED.finditer(lock.read_text())}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_package_of_a_lock_has_one_version_and_a_hash(lock: Path) -> None:
    blocks = re.split(r"^(?=[a-z0-9-]+==)", lock.read_text(), flags=re.MULTILINE)[1:]

    assert len(blocks) == len(pinned(lock))
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in re.sub(r"#.*", "", lock.read_text())


def test_the_locked_versions_are_at_least_the_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for lock, texts in ((RUNTIME, project["dependencies"]), (LOCKS[0], project["optional-dependencies"]["dev"])):
        for requirement in map(Requirement, texts):
            assert requirement.specifier.contains(Version(pinned(lock)[requirement.name])), requirement


def test_the_image_installs_nothing_that_builds_or_tests() -> None:
    assert not BUILD_TOOLS & set(pinned(RUNTIME))
    assert {"hatchling", "setuptools"} <= set(pinned(LOCKS[2]))
    assert "tests" not in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text()
    assert "pip install" not in FINAL_STAGE
    assert "--without-pip /opt/pointsman" in DOCKERFILE
    assert "'pip', 'setuptools', 'wheel', 'ensurepip'" in ROOT_STAGE
    assert "python -m compileall" in ROOT_STAGE  # read-only containers would compile the library at every health check
    assert [line for line in FINAL_STAGE.splitlines() if line.startswith("COPY")] == [
        "COPY --from=root / /",
        "COPY --from=packages /opt/pointsman /opt/pointsman",
        "COPY --from=own /own/opt/pointsman /opt/pointsman",
        "COPY deploy/healthcheck.py /opt/pointsman/healthcheck.py",
        "COPY deploy/image.toml /etc/pointsman/00-image.toml",
    ]


def test_the_image_runs_as_nobody_of_importance_and_says_what_it_is() -> None:
    assert FINAL_STAGE.index("USER 10001:10001") > FINAL_STAGE.rindex("COPY ")
    for label in ("title", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in FINAL_STAGE


PACKAGE = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([PACKAGE], 0, "1 packages, 0 known vulnerabilities"),
        ([PACKAGE, FLAWED], 1, "b 2: CVE-1, fixed in 3"),
        ([SKIPPED, SKIPPED], 2, "NOT AUDITED: 2 of 2 packages, for example: Dependency not found"),
        ([PACKAGE, SKIPPED], 2, "NOT AUDITED: 1 of 2"),
        ([FLAWED, SKIPPED], 1, "CVE-1"),
    ],
)
def test_an_audit_that_could_not_look_does_not_say_that_all_is_well(
    packages: list[dict[str, Any]], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy_script("audit.py").verdict("lock", packages) == code
    assert says in capsys.readouterr().out


def test_an_audit_without_an_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy_script("audit.py").audited("deploy/no-such-lock.txt") == 2
    assert "NOT AUDITED" in capsys.readouterr().out


def test_the_bill_of_materials_has_every_package_of_the_image(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    command = ["requirements", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "-o", str(file)]
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *command, str(RUNTIME)], check=True, capture_output=True, timeout=60
    )
    content = json.loads(file.read_text())

    assert {one["name"]: one["version"] for one in content["components"]} == pinned(RUNTIME)
    assert content["bomFormat"] == "CycloneDX"
