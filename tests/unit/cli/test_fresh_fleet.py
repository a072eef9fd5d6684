"""A fresh fleet is nobody else's, whatever the environment names."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pointsman_cli.bench import fresh_fleet
from pointsman_cli.bench.fresh_fleet import FreshFleet

FOREIGN = ("POINTSMAN_NATS", "POINTSMAN_CONFIG", "POINTSMAN_SECRET_FILE", "POINTSMAN_NATS_DOMAIN", "POINTSMAN_ENGINE")
KEPT = ("POINTSMAN_VLLM_EVICTION", "POINTSMAN_LOG_LEVEL", "POINTSMAN_TTFT_WEIGHT", "PATH")


def test_it_does_not_inherit_which_fleet_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def spawn(_command: object, *, environment: dict[str, str], **_rest: Any) -> "subprocess.Popen[bytes]":
        started.append(environment)
        return subprocess.Popen(["true"])

    for variable in (*FOREIGN, *KEPT[:-1]):
        monkeypatch.setenv(variable, "here")
    monkeypatch.setattr(fresh_fleet, "spawn", spawn)
    fleet = FreshFleet(policy="dualmap", instances=1, speed=1.0, environment={"POINTSMAN_POOL": "given"})
    fleet._start(tmp_path / "data", tmp_path / "up.log").wait()

    assert not set(FOREIGN) & set(started[0])
    assert set(KEPT) <= set(started[0])
    assert started[0]["POINTSMAN_POOL"] == "given"
