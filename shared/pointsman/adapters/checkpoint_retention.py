"""Which checkpoint to drop for a new one. Kept are the oldest still usable, the newest two, and between them those that leave the
smallest gaps, so that a reader can start anywhere in what the log holds."""

from collections.abc import Iterable
from itertools import pairwise

from pointsman.ports import CheckpointLabel
from pointsman.primitives import Sequence

CHECKPOINTS_KEPT = 6


def superseded(kept: Iterable[CheckpointLabel], new: CheckpointLabel, *, log_begins: Sequence) -> CheckpointLabel:
    """Which of at least three is forgotten for the new one, of a log whose first entry is `log_begins`.

    First what no reader can use, the newest aside: of another log, of another fold, of an entry that is gone.
    """
    *older, newest = sorted(kept, key=lambda label: label.as_of)
    useless = [label for label in older if not _is_like(label, new) or label.as_of < log_begins]
    if useless:
        return useless[0]
    between = older[1:]
    return min(between, key=lambda label: _longest_stretch([*(o for o in older if o is not label), newest, new]))


def _is_like(label: CheckpointLabel, other: CheckpointLabel) -> bool:
    return (label.identity, label.form) == (other.identity, other.form)


def _longest_stretch(labels: Iterable[CheckpointLabel]) -> Sequence:
    return max(after.as_of - before.as_of for before, after in pairwise(labels))
