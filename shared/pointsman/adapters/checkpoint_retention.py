"""Chooses the checkpoint to replace. Keeps the oldest usable one, the newest two, and those between with the smallest
gaps."""

from collections.abc import Iterable
from itertools import pairwise

from pointsman.ports import CheckpointLabel
from pointsman.primitives import Sequence

CHECKPOINTS_KEPT = 6


def superseded(kept: Iterable[CheckpointLabel], new: CheckpointLabel, *, log_begins: Sequence) -> CheckpointLabel:
    """Returns the one of at least three to drop, given the log's first sequence. Unusable ones go first: other log,
    other fold code, or older than the log; never the newest."""
    *older, newest = sorted(kept, key=lambda label: label.as_of)
    form = (new.identity, new.form)
    useless = [label for label in older if (label.identity, label.form) != form or label.as_of < log_begins]
    if useless:
        return useless[0]
    between = older[1:]
    return min(between, key=lambda label: _longest_stretch([*(o for o in older if o is not label), newest, new]))


def _longest_stretch(labels: Iterable[CheckpointLabel]) -> Sequence:
    return max(after.as_of - before.as_of for before, after in pairwise(labels))
