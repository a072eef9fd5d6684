"""The hit-rate page says what the verdict says."""

import pytest

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_verdict import verdict
from pointsman.state.state import PoolSettings
from pointsman_cli.console.log.log_views import ladder_view


@pytest.mark.parametrize(
    "shares", [(80, 40, 60, 60, 40, 30), (80, 80, 20, 70, 70, 20), (80, 80, 80, 20, 20, 60), (80,) * 6]
)
def test_what_is_lost_at_each_rung_adds_up_and_the_worst_is_the_verdicts(shares: tuple[int, ...]) -> None:
    ladder = HitRateLadder(PoolSettings())
    for tally in ladder.figures.tallies(7200.0, "a"):
        tally.count(100, list(shares))
    view = ladder_view(ladder)
    judged = verdict(ladder.figures.ever)

    assert (view.verdict, view.cause) == (judged.sentence, judged.cause)
    assert view.pool is not None
    rungs = view.pool.rungs
    assert sum(rung.lost or 0.0 for rung in rungs) == pytest.approx((shares[0] - shares[-1]) / 100)
    worst = max(rungs, key=lambda rung: rung.lost or 0.0)
    assert not worst.lost or worst.rung == next(gap.rung for gap in judged.gaps if gap.cause == judged.cause)
    assert [rung.share for rung in rungs] == [share / 100 for share in shares]
    assert [group.rungs[-1].share for group in (*view.tenants, *view.hours)] == [shares[-1] / 100] * 2


def test_without_requests_there_is_no_ladder() -> None:
    view = ladder_view(HitRateLadder(PoolSettings()))

    assert view.pool is None
    assert (view.tenants, view.hours) == ([], [])
