"""The measurement of memory and starts, on a tiny pool."""

import json
from pathlib import Path

from click.testing import CliRunner

from pointsman_lab.copies import copies_command


def test_it_measures_a_process_with_the_index_one_without_and_one_that_writes(tmp_path: Path) -> None:
    out = tmp_path / "copies.json"

    done = CliRunner().invoke(copies_command, ["--instances", "8", "--blocks", "4096", "--out", str(out)])

    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["bytes"] - row["head_bytes"] > 4096 / 4 * 8
    assert "write_s" in row["writer"]
    assert "write_s" not in row["head"]
    assert row["whole"]["modules_mb"] > 0
