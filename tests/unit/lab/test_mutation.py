"""`pointsman-lab mutation`: planted defects apply to the source as it is."""

from pathlib import Path

from pointsman_lab.torture.mutation import mutant_of, sources
from pointsman_lab.torture.planted import DEFECTS, planted

ROOT = Path(__file__).parents[3]


def test_each_planted_defect_is_in_one_place() -> None:
    assert len(list(planted(ROOT))) == len(DEFECTS)


def test_a_mutant_changes_one_statement() -> None:
    file, source = next((file, text) for file, text in sources(ROOT).items() if file.endswith("prefix_index.py"))

    mutant = mutant_of(file, source, 0)

    assert mutant.before != mutant.after
    assert mutant.source != source
