"""Processes of a real fleet die, stand still and lose their network while it serves, and nothing is lost or doubled.

Short runs of `pointsman-lab faults`, which judges each itself; a seed that fails here is run again by its command.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.up import POINTSMAN_LAB

RUN_SECONDS_MAX = 280.0
REQUESTS_A_FAULT = 15
REQUESTS_MIN = 60
FAULTS = (
    "kill:leader",
    "kill:worker",
    "kill:engine",
    "kill:nats",
    "kill:ingress",
    "kill:ingress+leader",
    "freeze:leader",
    "network:cut",
    "network:delay",
    "network:drop",
)


def struck(directory: Path, *arguments: str, faults: Sequence[str]) -> dict[str, Any]:
    """The report of one run, which must have held."""
    report = directory / "report.json"
    requests = max(REQUESTS_MIN, REQUESTS_A_FAULT * len(faults))
    command = [POINTSMAN_LAB, "faults", "--workload", "chat", "--requests", str(requests), "--instances", "2"]
    command += [
        "--faults",
        ",".join(faults),
        "--rate",
        "1",
        "--speed",
        "10",
        "--data",
        str(directory / "run"),
        "--out",
        str(report),
        *arguments,
    ]
    environment = os.environ | {"XDG_STATE_HOME": str(directory / "state"), "TMPDIR": "/tmp"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, env=environment, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_processes_that_die_or_stand_still_and_a_network_that_fails_lose_and_double_nothing(tmp_path: Path) -> None:
    report = struck(tmp_path, "--seed", "3", faults=FAULTS)

    assert sorted(injection["fault"] for injection in report["injections"]) == sorted(FAULTS)
    assert all(injection["well_s"] is not None for injection in report["injections"])
    assert (report["lost"], report["doubled"]) == (0, 0)
    assert report["terms"] > 1


def test_a_cluster_goes_on_without_the_server_that_led_its_log(tmp_path: Path) -> None:
    report = struck(tmp_path, "--nats-servers", "3", "--seed", "7", faults=["kill:nats"])

    assert (report["lost"], report["doubled"]) == (0, 0)
    assert report["injections"][0]["victim"].startswith("nats-")
