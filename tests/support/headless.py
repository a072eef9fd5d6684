"""A log that has lost its beginning, as a file: with the checkpoint that its export would carry, or without one."""

from collections.abc import Sequence
from pathlib import Path

from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.simulation.replay import BaseState, fold
from pointsman.state.state import PoolSettings
from pointsman_cli.history.bundle import BundleHistory, write_bundle
from pointsman_cli.history.checkpoint import kept_from
from pointsman_cli.history.entries import Header


def write_headless(
    file: Path,
    entries: Sequence[LogEntry],
    gone: int,
    *,
    settings: PoolSettings,
    checkpoint: tuple[int, PolicySet] | None = None,
) -> Path:
    """All but the first `gone` entries. `checkpoint`: of which entry, and the policies that decided then."""
    left = entries[gone:]
    header = Header(pool="default", first=left[0].sequence, last=left[-1].sequence, entries=len(left))
    write_bundle(file, header, left)
    if checkpoint is not None:
        as_of, policies = checkpoint
        known = BaseState(fold(entries[:as_of], settings=settings, trackers=policies.trackers()), policies)
        write_bundle(file, header, left, kept_from(BundleHistory(file), known))
    return file
