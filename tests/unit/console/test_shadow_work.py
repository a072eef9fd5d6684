"""The console's side of shadow policies: choosing them, working for them within a share of a core, and their metrics."""

import asyncio
import time
from collections.abc import Sequence

import click
import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.analysis.shadow import SHADOWS_MAX, Shadow, ShadowSummary
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, Term, WallSeconds
from pointsman.state.state import State
from pointsman_cli.console.jobs import shadow_work
from pointsman_cli.console.jobs.shadow_work import shadow_of, simulate
from pointsman_cli.console.log.metrics import ShadowMetrics
from pointsman_cli.console.pages.shadow_page import shadowed
from pointsman_cli.console.pages.shadow_page import verdict as shadow_verdict
from pointsman_cli.console.views import ShadowsView
from tests.support.recorded_log import SETTINGS, RecordedFleet


def followed(texts: Sequence[str], *last: LogEvent) -> tuple[Shadow, ShadowSummary]:
    state = State(SETTINGS)
    made = shadow_of(texts)
    assert made is not None
    shadow = made(state)
    entries = list(RecordedFleet(policy_set(routing="pointsman"), seed=5).live(300).write_all().entries)
    for event in last:
        entries.append(LogEntry(entries[-1].sequence + 1, "pm.p.leader", b"", event))
    for entry in entries:
        state.apply_entry(entry)
        shadow.apply(entry)
    shadow.finish()
    return shadow, shadow.summary()


def test_unknown_policies_and_too_many_are_refused_at_the_command_line() -> None:
    with pytest.raises(click.BadParameter, match="there is no routing policy no_such"):
        shadow_of(["round_robin", "no_such"])
    with pytest.raises(click.BadParameter, match=f"at most {SHADOWS_MAX}"):
        shadow_of([f"random:seed={number}" for number in range(SHADOWS_MAX + 1)])
    assert shadow_of([]) is None
    assert [report.name for report in followed(["random", "random"])[1].shadows] == ["random"]


def test_metrics_count_each_decision_once() -> None:
    pool = PoolName("shadow-metrics")
    shadow, summary = followed(["round_robin", "pointsman"])
    metrics = ShadowMetrics(pool)
    metrics.update(shadow)
    metrics.update(shadow)

    for report in summary.shadows:
        labels = {"pool": pool, "shadow": report.name}
        for agreement in ("same", "other", "both_reject"):
            found = REGISTRY.get_sample_value("pointsman_shadow_decisions_total", labels | {"agreement": agreement})
            assert found == getattr(report.total, agreement)
        tokens = REGISTRY.get_sample_value("pointsman_shadow_cached_tokens_total", labels | {"side": "shadow"})
        assert tokens == report.total.shadow_cached_tokens
    assert summary.shadows[0].total.other > 0


def test_the_page_says_why_a_policy_cannot_decide_in_this_term() -> None:
    elected = LeaderElected(at=900.0, term=Term(9), scheduler="s", as_of=0, policy="of_tomorrow", settings={"a": 1.0})

    _, summary = followed(["round_robin"], elected)
    [shown] = shadowed(summary, speed=1.0)

    assert "of_tomorrow" in shown.problem
    assert shown.report.total.decided, "before"
    assert shown.problem in shadow_verdict(ShadowsView(policy="of_tomorrow", summary=summary)).sentence


class Worked:
    """A shadow with so many slices of work, each taking its seconds of CPU."""

    def __init__(self, slices: int) -> None:
        self.left = slices
        self.cpu = 0.0

    def work(self) -> bool:
        self.left -= self.left > 0
        self.cpu += 0.005 if self.left else 0.0
        return self.left > 0


class NotedClock(ScaledClock):
    def __init__(self, naps: int) -> None:
        super().__init__()
        self.slept: list[WallSeconds] = []
        self._naps = naps

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        self.slept.append(seconds)
        if len(self.slept) >= self._naps:
            raise asyncio.CancelledError


async def test_work_stays_within_its_share_and_waits_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    worked, clock = Worked(slices=9), NotedClock(naps=4)
    monkeypatch.setattr(time, "thread_time", lambda: worked.cpu)

    with pytest.raises(asyncio.CancelledError):
        await simulate(lambda: worked, clock)  # type: ignore[arg-type, return-value]

    busy = 0.04 / shadow_work.CORE_SHARE * (1 - shadow_work.CORE_SHARE)
    assert sum(map(float, clock.slept[:2])) == pytest.approx(busy)
    assert clock.slept[2:] == [shadow_work.IDLE_WALL_SECONDS] * 2
