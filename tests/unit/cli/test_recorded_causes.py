"""Bundles of real fleets of two simulated engines at four times real time, with admission off, into which a cause was
planted. In `recorded/`: `ahead` (two prompts of 60,000 tokens, ten short ones behind them), `slow` (engine-2 told to be
15 times slower, as of the 31st request), `stale` (engine-2 told to forget its cache, before the 31st request)."""

import re
from pathlib import Path

import pytest

from pointsman.contracts.requests import RequestFinished
from pointsman_cli.history.sources import open_history
from tests.support.commands import told_by

RECORDED = Path(__file__).parent / "recorded"
BEFORE = 30
CAUSES = {
    "ahead": (
        "long_prompt_ahead",
        r"^slow because 62,882 tokens were ahead of it on engine-2, 60,000 of them one prompt$",
    ),
    "slow": ("slow_engine", r"engine-2 was slow: it took \d\d\.\d times what its cost model says$"),
    "stale": ("stale_index", r"the index was stale: 8,192 tokens expected in the cache of engine-2 were not there$"),
}
DOCTOR = {
    "ahead": r"^11 of 42 requests were late, 82% of them because a long prompt was ahead of them$",
    "slow": r"engine-2; 6 prefills took \d\d\.\d times what the cost model says$",
    "stale": r"^the cache of engine-2 was emptied behind its back: in 3 answers it found 0 of 24,576 tokens",
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_slowest_request_after_the_fault_names_it(name: str) -> None:
    bundle = str(RECORDED / f"{name}.pmlog")
    with open_history(bundle, None) as history:
        ends = [e.event for e in history.entries() if isinstance(e.event, RequestFinished)]
    met = [e for e in ends[BEFORE:] if e.instance == "engine-2" and e.prompt_tokens < 60_000]
    slowest = max(met, key=lambda event: event.ttft)
    verdict = told_by("explain", "--from", bundle, slowest.request)["verdict"]

    cause, says = CAUSES[name]
    assert verdict["cause"] == cause
    assert re.search(says, verdict["sentence"]), verdict["sentence"]


@pytest.mark.parametrize("name", DOCTOR)
def test_the_doctor_names_it_in_its_first_line(name: str) -> None:
    report = told_by("doctor", "--from", str(RECORDED / f"{name}.pmlog"))

    assert re.search(DOCTOR[name], report["verdict"]), report["verdict"]
    assert "calibrate" not in " ".join(finding["advice"] for finding in report["findings"])
