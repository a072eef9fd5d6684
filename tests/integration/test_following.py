"""The measurement of a worker that follows several engines, on two."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pointsman_lab import following

PAGE = Path(__file__).parents[2] / "docs/engines.md"
ROWS = {
    "batches/s published": "batches_a_second",
    "CPU, share of one core": "cpu_percent_of_a_core",
    "CPU to start": "cpu_seconds_to_start",
    "memory (proportional set)": "memory_mb",
    "threads; connections to NATS": "threads",
    "longest time between two reports of an engine": "report_gap_max_s",
}
"""Figure of each row of the page's table."""


def test_it_measures_one_worker_of_all_engines_beside_a_worker_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SETTLE_SECONDS", 0.1)
    out = tmp_path / "following.json"
    told = ["--engines", "2", "--seconds", "3", "--batches", "20", "--out", str(out)]

    done = CliRunner().invoke(following.following_command, told)

    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    one, each = figures.pop("one"), figures.pop("each")
    assert figures == {"engines": 2, "seconds": 3.0, "batches_a_second_and_engine": 20.0}
    assert (one["processes"], each["processes"]) == (1, 2)
    assert one["engines_followed"] == each["engines_followed"] == 2
    assert one.keys() == each.keys()
    assert all(figure > 0 for figure in (*one.values(), *each.values()))
    assert one["memory_mb"] < each["memory_mb"]
    section = PAGE.read_text().partition("### Cost of following")[2].partition("\n#")[0]
    rows = {line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")}
    assert rows - {""} == ROWS.keys()
    assert set(ROWS.values()) <= one.keys()
