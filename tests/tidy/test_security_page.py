"""docs/security.md names a test for each attack; each is there, and where it is said to be."""

import re
from pathlib import Path

from tests.tidy.pages import ROOT

PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"`(test_\w+\.py)(?:::(test_\w+))?`")
ATTACKS = re.compile(r"^\| (\d+) \|(.*)$", re.MULTILINE)
LINES_MAX = 130
"""Two pages."""


def missing(file: str, test: str) -> bool:
    modules = [path.read_text() for path in Path(ROOT / "tests").rglob(file)]
    return not any(re.search(rf"^(async )?def {test or 'test_'}", module, re.MULTILINE) for module in modules)


def test_every_test_that_it_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text())

    assert len(named) >= 20
    assert [f"{file}::{test}" for file, test in named if missing(file, test)] == []


def test_every_attack_has_a_test() -> None:
    rows = ATTACKS.findall(PAGE.read_text())

    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 12
    assert [number for number, row in rows if not NAMED.search(row)] == []


def test_it_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= LINES_MAX
