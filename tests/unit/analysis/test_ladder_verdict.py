"""The verdict of a ladder: the largest loss, and gaps that add up."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.analysis.ladder_figures import RUNGS, Rung, Tally
from pointsman.analysis.ladder_verdict import ADVICE, BELOW, WHY, AdvisedOptions, Loss, verdict


def tally(*shares: int) -> Tally:
    """In per cent."""
    return Tally(requests=1, prompt_tokens=100, tokens=list(shares))


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        ((80, 40, 40, 40, 40, 30), Loss.CAPACITY),
        ((80, 78, 40, 40, 40, 30), Loss.SPREAD),
        ((80, 80, 80, 40, 40, 30), Loss.INDEX),
        ((80, 80, 80, 80, 40, 30), Loss.CHOICE),
        ((80, 80, 80, 80, 80, 30), Loss.DELIVERY),
        ((80, 80, 79, 79, 79, 79), Loss.NOTHING),
        ((80, 30, 60, 60, 40, 40), Loss.CAPACITY),  # engines held more than one cache of their size would
        ((80, 80, 20, 70, 70, 20), Loss.STALE),  # caches were emptied behind the index's back
        ((80, 80, 80, 20, 20, 60), Loss.INDEX),  # delivered although nobody knew
    ],
)
def test_the_first_line_names_the_largest_loss(shares: tuple[int, ...], cause: Loss) -> None:
    judged = verdict(tally(*shares))

    assert judged.cause is cause
    if cause is not Loss.NOTHING:
        assert judged.sentence.startswith(f"most is lost by {cause}: ")
        assert WHY[cause] in judged.sentence


def test_one_line_with_its_numbers() -> None:
    assert verdict(tally(80, 40, 40, 40, 40, 30)).sentence == (
        "most is lost by capacity: 40.0 of 50.0 points; the fleet's KV caches are too small for the prefixes that come back "
        "(30.0% of prompt tokens were cached, 80.0% had been sent before)"
    )


def test_what_the_index_believed_and_nobody_held_is_said_beside() -> None:
    assert "50.0 points that no engine held" in verdict(tally(80, 80, 20, 70, 70, 20)).note
    assert verdict(tally(80, 80, 70, 70, 70, 70)).note == ""


def test_without_requests_nothing_is_claimed() -> None:
    judged = verdict(Tally())

    assert (judged.cause, judged.gaps) == (Loss.UNKNOWN, [])


@given(st.lists(st.integers(0, 100), min_size=6, max_size=6))
def test_gaps_add_up_to_all_that_was_lost(shares: list[int]) -> None:
    shares[0] = max(shares[0], shares[-1])  # what was delivered had been sent before
    gaps = verdict(tally(*shares)).gaps

    assert sum(gap.share for gap in gaps) == pytest.approx((shares[0] - shares[-1]) / 100)
    assert all(gap.share >= 0 for gap in gaps)
    assert [gap.rung for gap in gaps] == list(RUNGS[1:])


@pytest.mark.parametrize("shares", [(80, 60, 50, 30, 20, 10), (80, 80, 20, 70, 70, 20)])
def test_every_command_that_is_advised_reads_the_log_that_was_counted(shares: tuple[int, ...]) -> None:
    def advised(options: AdvisedOptions) -> str:
        judged = verdict(tally(*shares), options)
        return " ".join([*(gap.advice for gap in judged.gaps), judged.note])

    told, plain = advised(AdvisedOptions(log=" --from 'a log'", fleet=" --pool chat")), advised(AdvisedOptions())
    commands = re.findall(r"`(pointsman [^`]*)`", told)

    assert commands
    for command in commands:
        here = " --pool chat" if "fleet" in command else " --from 'a log'"
        assert re.match(rf"pointsman [a-z-]+{here}($| )", command), command
        assert not re.search(r"--[a-z]+$", command), f"{command} lacks a value"
    assert "{" not in told + plain
    assert "--from" not in plain


def test_every_gap_has_a_cause_and_advice() -> None:
    assert set(BELOW) == set(RUNGS) - {Rung.UNBOUNDED}
    assert set(WHY) == set(ADVICE) == {*BELOW.values(), Loss.STALE}
