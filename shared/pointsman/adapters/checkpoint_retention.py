"""Chooses the checkpoint to replace. Keeps the oldest usable one, the newest two, and those between with the smallest
gaps."""

from collections.abc import Iterable
from itertools import pairwise

from pointsman.ports import CheckpointLabel
from pointsman.primitives import Sequence

CHECKPOINTS_KEPT = 6


def superseded(kept: Iterable[CheckpointLabel], new: CheckpointLabel, *, log_begins: Sequence) -> CheckpointLabel:
    """Returns the one of at least three to drop, given the log's first sequence. Unusable ones go first: other log, other
    fold code, or older than the log. The newest of this log never goes: another version may start from it."""
    ordered = sorted(kept, key=lambda label: label.as_of)
    of_other_logs = [label for label in ordered if label.identity != new.identity]
    if of_other_logs:
        return of_other_logs[0]
    *older, newest = ordered
    useless = [label for label in older if label.form != new.form or label.as_of < log_begins]
    if useless:
        return useless[0]
    between = older[1:]
    return min(between, key=lambda label: _longest_stretch([*(o for o in older if o is not label), newest, new]))


def _longest_stretch(labels: Iterable[CheckpointLabel]) -> Sequence:
    return max(after.as_of - before.as_of for before, after in pairwise(labels))
