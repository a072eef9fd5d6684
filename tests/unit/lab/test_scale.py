"""The page about large pools: what it says of planted numbers. And that docs/ has the page of its numbers."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jinja2 import UndefinedError

from pointsman_lab.scale.command import scale_command
from pointsman_lab.scale.page import page

DOCS = Path(__file__).parents[3] / "docs"


def planted(instances: int, **changed: Any) -> dict[str, Any]:
    steady = {
        "instances": instances, "requests_a_second": 400.0, "decisions_a_second": 399.5, "decision_p50_ms": 0.25,
        "decision_p99_ms": 1.75, "leader_waits_percent": 3.0, "log_kb_a_second": 1_750.5, "log_bytes_a_request": 4_321,
        "log_bytes_an_engine_and_second": 3_377, "cores": 2, "blocks": 2_000, "cpu_ms_a_request": {"leader": 0.75},
    }  # fmt: skip
    return {
        **steady,
        "with_followers": steady | {"decision_p99_ms": 6.25, "cpu_ms_a_request": {"leader": 0.8, "recorder": 0.2}},
        "memory_mb": {"leader": 191, "recorder": 88},
        "fold_entries_a_second": 21_000,
        "take_over_seconds": 1.31,
        "start_seconds": 3.25,
        "bytes_by_kind": {"RequestPlaced": 600, "RequestArrived": 396, "InstanceLeft": 4},
        **changed,
    }


def rows_of(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading."""
    below = text.split(f"## {heading}\n", 1)[1].splitlines()
    start = next(number for number, line in enumerate(below) if line.startswith("| "))
    lines = takewhile(lambda line: line.startswith("|"), below[start:])
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [row for row in cells if set(row) != {"---"}]


def verdicts(text: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in text.split("\n## ", 1)[0].splitlines() if "at most" in line]
    return {cells[0]: cells[-1] for cells in lines if len(cells) == 4}


def test_every_size_has_its_figures_in_order() -> None:
    text = page([planted(512), planted(16, requests_a_second=128.0, start_seconds=None)])

    head, *rows = rows_of(text, "Decisions, log, start and take-over")
    assert [row[0] for row in rows] == ["16", "512"]
    found = dict(zip(head, rows[1], strict=True))
    assert (found["decision, P50"], found["P99"]) == ("0.25", "1.75")
    assert (found["log, kB/s"], found["bytes a request"], found["take-over, s"]) == ("1,750.5", "4,321", "1.31")
    assert dict(zip(head, rows[0], strict=True))["start, s"] == "-"


@pytest.mark.parametrize(
    ("what", "name", "met", "missed"),
    [
        ("log", "log_kb_a_second", 2_000.0, 2_000.1),
        ("decision, P99", "decision_p99_ms", 2.0, 2.001),
        ("take-over", "take_over_seconds", 2.0, 2.01),
        ("start from a checkpoint", "start_seconds", 10.0, 10.01),
    ],
)
def test_a_target_is_met_up_to_its_bound(what: str, name: str, met: float, missed: float) -> None:
    assert verdicts(page([planted(512, **{name: met})]))[what] == "met"
    assert verdicts(page([planted(512, **{name: missed})]))[what] == "**missed**"
    assert verdicts(page([planted(512, **{name: None})]))[what] == "not measured"


def test_a_target_is_met_at_its_rate_only() -> None:
    text = page([planted(512, requests_a_second=200.0, take_over_seconds=2.1)])

    assert set(verdicts(text).values()) == {"**met at 200/s only**", "**missed**"}
    assert "The targets are for 400" in text


def test_targets_are_of_512_instances() -> None:
    assert len(verdicts(page([planted(16), planted(512)]))) == 4
    assert not verdicts(page([planted(16), planted(256)]))


def test_what_the_followers_cost_the_leader_is_told_beside_it() -> None:
    text = page([planted(512)])

    head, row = rows_of(text, "Conditions")
    assert [row[number] for number, title in enumerate(head) if title == "P99"] == ["1.75", "6.25"]
    assert rows_of(text, "CPU") == [["instances", "leader", "recorder"], ["512", "0.8", "0.2"]]
    assert "RequestPlaced 60%, RequestArrived 40%" in text
    assert "InstanceLeft" not in text


def test_a_number_that_is_not_there_is_an_error() -> None:
    row = planted(512)
    del row["cores"]
    with pytest.raises(UndefinedError, match="cores"):
        page([row])
    row = planted(512)
    del row["decision_p99_ms"]
    with pytest.raises(KeyError, match="decision_p99_ms"):
        page([row])


def test_the_page_is_written_from_numbers_without_measuring(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "scale.json").write_text(json.dumps({"rows": [planted(64), planted(512)]}))

    done = CliRunner().invoke(scale_command, ["--page", "--out", str(tmp_path)])

    assert done.exit_code == 0, done.output
    assert (tmp_path / "scale.md").read_text() == page([planted(64), planted(512)])
    assert (tmp_path / "images" / "scale.png").stat().st_size > 10_000


def test_the_page_in_docs_is_what_its_numbers_give() -> None:
    file = DOCS / "results" / "scale.json"
    if not file.exists():
        pytest.skip("`pointsman-lab scale --out docs` writes it")
    rows = json.loads(file.read_bytes())["rows"]

    assert (DOCS / "scale.md").read_text() == page(rows)
