"""Which checkpoints stay: however a log grows and loses its head, one is always in the older half of what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.adapters.checkpoint_retention import CHECKPOINTS_KEPT, superseded
from pointsman.ports import CheckpointLabel


def label(as_of: int, *, form: str = "now", identity: str = "log") -> CheckpointLabel:
    return CheckpointLabel(identity=identity, as_of=as_of, entry="e", form=form)


def saved(kept: list[CheckpointLabel], new: CheckpointLabel, log_begins: int = 1) -> list[CheckpointLabel]:
    left = (
        [k for k in kept if k != superseded(kept, new, log_begins=log_begins)]
        if len(kept) == CHECKPOINTS_KEPT
        else kept
    )
    return [*left, new]


@given(st.lists(st.integers(1, 20), min_size=200, max_size=400))
def test_what_is_kept_reaches_back_over_half_of_a_log_of_any_length(steps: list[int]) -> None:
    kept: list[CheckpointLabel] = []
    holds, last = 600, 0
    for step in steps:
        last += step
        begins = max(1, last - holds)
        kept = saved(kept, label(last), begins)
        usable = [k.as_of for k in kept if k.as_of >= begins]
        if begins > 1:
            assert last - min(usable) >= holds / 2 - 2 * max(steps)
        assert len(kept) <= CHECKPOINTS_KEPT


def test_the_newest_two_always_stay() -> None:
    kept: list[CheckpointLabel] = []
    for as_of in range(1, 100):
        kept = saved(kept, label(as_of))

        assert {k.as_of for k in kept} >= {max(1, as_of - 1), as_of}


@pytest.mark.parametrize("useless", [label(30, form="before"), label(3)])
def test_what_nobody_can_use_goes_first(useless: CheckpointLabel) -> None:
    kept = [label(10), label(20), useless, label(40)]

    assert superseded(kept, label(50), log_begins=5) == useless


def test_the_newest_stays_even_if_another_version_wrote_it() -> None:
    kept = [label(10), label(20), label(30), label(40, form="before")]

    assert superseded(kept, label(50), log_begins=1) in kept[1:3]


@pytest.mark.parametrize("of_old_log", [[10_000_000], [5, 10_000_000], list(range(1000, 7000, 1000))])
def test_the_checkpoints_of_a_lost_log_do_not_change_which_ones_of_the_new_log_stay(of_old_log: list[int]) -> None:
    alone: list[CheckpointLabel] = []
    beside = [label(as_of, identity="lost") for as_of in of_old_log]
    for as_of in range(1000, 200_000, 1000):
        alone, beside = saved(alone, label(as_of)), saved(beside, label(as_of))

    assert beside == alone
