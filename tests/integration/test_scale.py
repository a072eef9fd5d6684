"""`pointsman-lab scale` at a small size: real NATS, schedulers and followers; instances that tell the leader and the log
what a worker would."""

import json
from pathlib import Path

from click.testing import CliRunner

from pointsman_lab.scale.command import scale_command


def test_a_small_pool_is_measured_from_its_first_request_to_the_next_leader(tmp_path: Path) -> None:
    options = ["--quick", "--instances", "4", "--rate", "10", "--out", str(tmp_path)]

    done = CliRunner().invoke(scale_command, options)

    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "results" / "scale.json").read_text())["rows"]
    assert row["decisions_a_second"] > 0
    assert row["decision_p50_ms"] <= row["decision_p99_ms"]
    assert row["take_over_seconds"] > 0
    assert row["start_seconds"] > 0, "it started from a checkpoint"
    assert row["dead_letters"] == 0
    assert {"BlocksStored", "RequestPlaced", "PrefillFinished", "RequestFinished"} <= row["bytes_by_kind"].keys()
    everyone = {"nats", "leader", "standby", "recorder", "rebalancer", "scaler", "instances and ingress"}
    assert everyone <= row["memory_mb"].keys()
    assert everyone <= row["with_followers"]["cpu_ms_a_request"].keys()
    assert "| 4 |" in (tmp_path / "scale.md").read_text()
