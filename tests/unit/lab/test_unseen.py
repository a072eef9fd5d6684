"""Drawn workloads: what a draw keeps to, and the comparison on small ones."""

import json
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from pointsman_lab import unseen
from pointsman_lab.unseen import RATE_MAX, SHAPES, SHARE_MAX, drawn, unseen_command, varied

NAMES = [generator.__name__ for generator in SHAPES]


@pytest.mark.parametrize("usual", SHAPES.values(), ids=NAMES)
def test_a_varied_shape_is_another_one_that_the_generator_can_take(usual: Any) -> None:
    for seed in range(50):
        shape = varied(usual, Random(seed))

        assert shape != usual
        for name in (field.name for field in fields(shape)):
            before, after = getattr(usual, name), getattr(shape, name)
            assert type(after) is type(before)
            if isinstance(after, int) and not isinstance(after, bool):
                assert after >= min(1, before)
            if isinstance(after, float) and name.endswith("_share"):
                assert 0 <= after <= max(SHARE_MAX, before)
            if name.endswith("_min") and hasattr(shape, f"{name[:-4]}_max"):
                assert after <= getattr(shape, f"{name[:-4]}_max")


def test_a_seed_is_one_workload_near_saturation_and_others_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "REQUESTS_MIN", 300)

    workload, again, another = drawn(1), drawn(1), drawn(2)

    assert workload == again
    assert workload.requests() == again.requests()
    assert (workload.generator, workload.shape) != (another.generator, another.shape)
    assert 0 < workload.rate <= RATE_MAX


def test_the_command_compares_under_both_admissions_and_says_who_was_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unseen, "REQUESTS_MIN", 300)
    monkeypatch.setattr(unseen, "SECONDS_MIN", 0.0)
    monkeypatch.setattr(unseen, "WARMUP", 100)
    out = tmp_path / "unseen.json"

    done = CliRunner().invoke(unseen_command, ["--first", "3", "--workloads", "2", "--jobs", "1", "--out", str(out)])

    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["workloads"]
    assert [workload["seed"] for workload in found] == [3, 4]
    for workload in found:
        assert set(workload["capacity"]) == {"predicted_ttft_fair", "none"}
        for capacities in workload["capacity"].values():
            assert "pointsman" in capacities
            assert all(0 <= capacity <= 1 for capacity in capacities.values())
    leads = []
    for capacities in (workload["capacity"]["none"] for workload in found):
        own = capacities.pop("pointsman")
        leads.append(100 * (own - max(capacities.values())))
    assert f"least {min(leads):+.1f} points" in done.output
