"""CONTRIBUTING.md adds a routing policy step by step: its code and its commands work as they are written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"Create `(?P<file>[^`]+)`:\n\n```python\n(?P<code>.*?)```|```sh\n(?P<commands>.*?)```", re.DOTALL)
COPIED = ("docs/policies.md", "pyproject.toml", "shared", "tests")


def newcomers_checkout(root: Path) -> None:
    """What the example reads and changes, with the environment of this checkout."""
    for name in COPIED:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(source, target)
    (root / ".venv").symlink_to(sys.prefix)


@pytest.mark.timeout(300)
def test_the_worked_example_leads_from_a_file_to_a_row_in_the_results(tmp_path: Path) -> None:
    newcomers_checkout(tmp_path)
    paths = [tmp_path / "shared", tmp_path / "shared/pointsman_lab/src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "200"}
    environment.pop("PYTEST_ADDOPTS", None)
    _, _, example = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Add a routing policy\n")

    printed = []
    for step in STEP.finditer(example.partition("\n## ")[0]):
        if step["file"]:
            (tmp_path / step["file"]).write_text(step["code"])
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", step["commands"]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step['commands']}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)

    *_, tested, compared, results = printed
    assert "passed" in tested
    assert re.search(r"^ +linear_score:load_weight=0\.2 +[01]\.\d+", compared, re.MULTILINE)
    assert re.search(r"^\| `linear_score` \| [01]\.\d+ \|", results, re.MULTILINE)
