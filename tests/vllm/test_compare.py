"""The comparison of docs/engines.md: the same conversations through round robin and through Pointsman, on real engines."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.up import POINTSMAN

COMPARISON = "bench --policy round_robin,pointsman --engine vllm --instances 2 --requests 100 --workload chat --shrink 8 --input-tokens-max 14000 --output-tokens-max 8 --rate 2"


@pytest.mark.timeout(2400)
def test_of_a_hundred_requests_of_conversations_more_is_found_in_the_caches_than_in_turn(
    vllm_home: EngineHome, tell_what_was_measured: Callable[[str], None], tmp_path: Path
) -> None:
    """On fleets of its own, each fresh, one after the other."""
    numbers = tmp_path / "numbers.json"
    environment = os.environ | {"POINTSMAN_VLLM_DIR": str(vllm_home.directory), "XDG_STATE_HOME": str(tmp_path)}

    done = subprocess.run(
        [POINTSMAN, *COMPARISON.split(), "--out", str(numbers)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    tell_what_was_measured(done.stdout)
    in_turn, pointsman = json.loads(numbers.read_text())["runs"]
    assert in_turn["completed"] == pointsman["completed"] == 100
    assert pointsman["hit_rate"] > in_turn["hit_rate"]
