"""Logs that an earlier version wrote fold into the same state, and every decision in them comes out the same again.

`logs/` holds bundles of torture runs (0.1.0 of 2026-11-22, fold version 3, and of 461fb369, version 6): every kind of event,
several terms, writes of deposed leaders, entries that do not decode. `fold-N.pmlog` are of `tests/support/recorded_log.py` with that
fold version: tenants with limits, and an engine that takes few prompts at a time; 10 with prompts that are late even alone, at engines
that fail, requests of several answers under `tpot_check`, and what its leader gives up comes again under another id.
`fold-10-order.pmlog`: tenants overtake each other in queues of `fair_edf`. 11: decisions come behind later ones, workers' clocks
differ, and an engine fails requests that come seldom. `expected.json` is what that version made of them; a
log that lost its beginning or a decision is in `test_fold.py` only.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.simulation.replay import fold, verify
from pointsman_cli.history.bundle import BundleHistory

LOGS = Path(__file__).parent / "logs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((LOGS / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_of_an_earlier_version_folds_into_the_same_state(name: str) -> None:
    history = BundleHistory(LOGS / name)
    state = fold(history)

    found = {
        instance.id: {
            "digest": f"{state.index.digest(instance.id):016x}",
            "blocks": state.index.blocks(instance.id),
            "status": str(instance.status),
            "correction": state.latency.correction(instance.id),
        }
        for instance in state.fleet.instances
    }
    assert found == EXPECTED[name]["instances"]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_decision_of_a_log_of_an_earlier_version_comes_out_the_same(name: str) -> None:
    history = BundleHistory(LOGS / name)
    verdict = verify(history)

    assert (verdict.decisions, verdict.identical) == (EXPECTED[name]["decisions"],) * 2
    assert not verdict.differences
