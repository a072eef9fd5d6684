"""Decisions keep to their template, and the index has each of them."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs/decisions"
DECISIONS = sorted(FOLDER.glob("[0-9]*.md"))
LINES_MAX, LINE_LENGTH_MAX = 25, 120
HEADINGS = ["## Context", "## Decision", "## Consequences"]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_short_and_follows_the_template(decision: Path) -> None:
    lines = decision.read_text().splitlines()

    assert lines[0].startswith(f"# {int(decision.name[:4])}. ")
    assert [line for line in lines if line.startswith("## ")] == HEADINGS
    assert len(lines) <= LINES_MAX
    assert [line for line in lines if len(line) > LINE_LENGTH_MAX] == []


def test_the_index_has_every_decision_once_and_numbers_are_dense() -> None:
    index = (FOLDER / "README.md").read_text()

    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    assert [path.name for path in DECISIONS if index.count(f"({path.name})") != 1] == []
