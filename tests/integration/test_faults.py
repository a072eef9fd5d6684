"""Processes of a real fleet die, stand still and lose their network while it serves, and nothing is lost or doubled.

Short runs of `pointsman-lab faults`, which judges each itself; a seed that fails here is run again by its command.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.up import POINTSMAN_LAB

RUN_SECONDS_MAX = 110.0
REQUESTS = 60


def struck(directory: Path, *arguments: str) -> dict[str, Any]:
    """The report of one run, which must have held."""
    report = directory / "report.json"
    command = [POINTSMAN_LAB, "faults", "--workload", "chat", "--requests", str(REQUESTS), "--instances", "2"]
    command += ["--rate", "1", "--speed", "10", "--data", str(directory / "run"), "--out", str(report), *arguments]
    environment = os.environ | {"XDG_STATE_HOME": str(directory / "state"), "TMPDIR": "/tmp"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, env=environment, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_killed_leader_worker_engine_and_nats_server_lose_and_double_nothing(tmp_path: Path) -> None:
    report = struck(tmp_path, "--faults", "kill:leader,kill:worker,kill:engine,kill:nats", "--seed", "3")

    assert len(report["injections"]) == 4
    assert all(injection["well_s"] is not None for injection in report["injections"])
    assert (report["lost"], report["doubled"]) == (0, 0)
    assert report["terms"] > 1


def test_a_killed_ingress_alone_and_with_the_leader_leaves_no_request_behind(tmp_path: Path) -> None:
    report = struck(tmp_path, "--faults", "kill:ingress,kill:ingress+leader", "--seed", "8")

    assert [injection["fault"] for injection in report["injections"]].count("kill:ingress+leader") == 1
    assert (report["lost"], report["doubled"]) == (0, 0)


def test_a_network_that_fails_between_services_and_nats_loses_and_doubles_nothing(tmp_path: Path) -> None:
    faults = "network:cut,network:delay,network:drop,freeze:leader"
    report = struck(tmp_path, "--faults", faults, "--seed", "6")

    assert len(report["injections"]) == 4
    assert (report["lost"], report["doubled"]) == (0, 0)


def test_a_cluster_goes_on_without_the_server_that_led_its_log(tmp_path: Path) -> None:
    report = struck(tmp_path, "--faults", "kill:nats", "--nats-servers", "3", "--seed", "7")

    assert (report["lost"], report["doubled"]) == (0, 0)
    assert report["injections"][0]["victim"].startswith("nats-")
