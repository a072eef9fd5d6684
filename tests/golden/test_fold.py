"""What a release has folded, later releases with the same FOLD_VERSION go on with: its checkpoints stay good.

`folds/<version>/` holds checkpoints of the recorded logs, taken in the middle and at the end by a fold of that version. If a
test here fails, the fold computes something else, and a leader that starts from a checkpoint would decide otherwise than one
that folds the log. A new attribute that follows from the rest of the state goes into `state/checkpoint_additions.py`;
everything else needs a new FOLD_VERSION. Only of a version that no release has may the checkpoints be written anew, with
`POINTSMAN_WRITE_GOLDEN=1 pytest tests/golden/test_fold.py`.
"""

import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.ports import LogEntry
from pointsman.simulation.replay.folding import pool_settings
from pointsman.state.checkpoint import decode_state, encode_state, state_digest
from pointsman.state.state import FOLD_VERSION, State
from pointsman.state.trackers.active_blocks import ActiveBlocks
from pointsman.state.trackers.attainment import Attainment
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.client_service import ClientService
from pointsman.state.trackers.decayed_load import DecayedLoad
from pointsman.state.trackers.deficits import Deficits
from pointsman.state.trackers.late_turns import LateCredit
from pointsman.state.trackers.queue_deficits import QueueDeficits
from pointsman.state.trackers.residuals import Residuals
from pointsman.state.trackers.tenant_shares import TenantShares
from pointsman.state.trackers.windowed_load import WindowedLoad
from pointsman_cli.history.bundle import BundleHistory

pytestmark = pytest.mark.usefixtures("plain_sums")

LOGS = Path(__file__).parent / "logs"
FOLDS = Path(__file__).parent / "folds" / str(FOLD_VERSION)
SETTINGS = {"settings", "learns_from_deliveries"}
UNTOUCHED = {"copies", "demand", "transfers"}
"""No recorded log reaches them: other tests must see that they keep their meaning."""
NAMES = sorted(log.stem for log in LOGS.glob("*.pmlog"))


def entries_of(name: str) -> list[LogEntry]:
    return list(BundleHistory(LOGS / f"{name}.pmlog"))


def begun(name: str) -> State:
    """Before the first entry: with this release's rules and the trackers of several policies."""
    settings = replace(pool_settings(BundleHistory(LOGS / f"{name}.pmlog")), fold_version=FOLD_VERSION)
    return State(settings, every_tracker())


def batched(entries: list[LogEntry], size: int = 20) -> Iterator[list[LogEntry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def every_tracker() -> tuple[Tracker, ...]:
    """With settings of this test's own, so that a policy may get other defaults."""
    load = DecayedLoad(10.0)
    return (
        Deficits(4096.0, 2.0),
        ActiveBlocks(),
        load,
        Residuals(load, 0.992),
        TenantShares(),
        WindowedLoad(180.0),
        Attainment(decile_share=0.6, tenant_share=0.8),
        QueueDeficits(quantum=1024.0, input_weight=1.0, output_weight=2.0),
        ClientService(input_weight=1.0, cached_weight=0.0, output_weight=2.0),
        LateCredit(late_share=0.05),
    )


def folded(state: State, entries: list[LogEntry]) -> State:
    for entry in entries:
        state.apply_entry(entry)
    return state


@pytest.mark.parametrize("name", NAMES)
def test_a_fold_from_an_earlier_releases_checkpoint_is_the_fold_of_the_whole_log(name: str) -> None:
    entries = entries_of(name)
    middle, end = len(entries) // 2, len(entries)
    if os.environ.get("POINTSMAN_WRITE_GOLDEN"):
        FOLDS.mkdir(parents=True, exist_ok=True)
        for at in (middle, end):
            content = encode_state(folded(begun(name), entries[:at]))
            (FOLDS / f"{name}.{at}.checkpoint").write_bytes(zlib.compress(content, 9))
    whole = state_digest(folded(begun(name), entries))

    for at in (middle, end):
        kept = decode_state(zlib.decompress((FOLDS / f"{name}.{at}.checkpoint").read_bytes()))
        assert state_digest(folded(kept, entries[at:])) == whole, f"the checkpoint at {at} goes on otherwise"


def test_the_recorded_logs_reach_every_part_of_a_state() -> None:
    """Else a part could change its meaning unnoticed."""
    untouched = set(vars(begun(NAMES[0]))) - set(State.DERIVED)
    for name in NAMES:
        state, entries = begun(name), entries_of(name)
        empty = {part: pickle.dumps(value) for part, value in vars(state).items()}
        for some in batched(entries):
            now = vars(folded(state, some))
            untouched -= {part for part in untouched if pickle.dumps(now[part]) != empty[part]}

    assert untouched == UNTOUCHED | SETTINGS
