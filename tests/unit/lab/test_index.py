"""The measurement of the prefix index, on a tiny one."""

import json
from pathlib import Path

from click.testing import CliRunner

from pointsman_lab.index import index_command

KEY_BYTES = 8


def test_it_times_matches_and_events_and_tells_memory_and_the_longest_pause(tmp_path: Path) -> None:
    out = tmp_path / "index.json"

    done = CliRunner().invoke(index_command, ["--instances", "3", "--blocks", "640", "--out", str(out)])

    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    times = {name: figures.pop(name) for name in ("match_us", "apply_stored_us", "apply_removed_us")}
    assert all(of_side["pointsman"] > 0 for of_side in times.values())
    assert all(f"{of_side['pointsman']:.2f}" in done.output for of_side in times.values())
    assert figures.keys() == {"bytes_per_block", "longest_pause_ms"}
    assert KEY_BYTES < figures["bytes_per_block"] < 100 * KEY_BYTES
    assert f"{figures['bytes_per_block']} bytes" in done.output
    assert f"{figures['longest_pause_ms']} ms" in done.output
