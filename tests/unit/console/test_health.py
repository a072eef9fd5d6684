"""What the first line of a page says."""

import msgspec
import pytest

from pointsman_cli.console.pages.context import run_verdict
from pointsman_cli.console.pages.health import Verdict, attention, pool_verdict, requests_verdict
from pointsman_cli.console.views import FleetView
from tests.support.console_views import EMPTY, fleet, requests, run, status


def with_engines(*changes: dict[str, str | float], **totals: int | float | None) -> FleetView:
    view = fleet(len(changes), calm=True)
    engines = [
        msgspec.structs.replace(engine, **change) for engine, change in zip(view.instances, changes, strict=True)
    ]
    ready = sum(engine.status == "ready" for engine in engines)
    return msgspec.structs.replace(
        view, instances=engines, totals=msgspec.structs.replace(view.totals, ready=ready, **totals)
    )


def test_a_calm_pool_is_healthy_in_one_sentence() -> None:
    verdict = pool_verdict(fleet(4, calm=True), status())

    assert verdict == Verdict("ok", "4 engines ready, every cache index exact, 99.1% of requests in time.", [])


@pytest.mark.parametrize(
    ("view", "level", "word"),
    [
        (with_engines({}, {}, {"status": "suspected"}), "warning", "1 of 3 engines out of service: engine-2 suspected"),
        (with_engines({}, {"status": "ejected"}), "serious", "1 of 2 engines out of service"),
        (with_engines({"status": "ejected"}), "serious", "No engine is ready"),
        (with_engines({}, {"knowledge": "blind"}), "serious", "engine-1: what its cache holds is not known (blind)"),
        (with_engines({"knowledge": "degraded"}, {"knowledge": "degraded"}), "warning", "engine-0, engine-1: what their caches"),
        (with_engines({}, {"pace": 3.0}), "warning", "engine-1: prefills take at least 2 times"),
        (with_engines({}, {}, goodput=0.93), "warning", "7.0% of the last minute's requests were not served in time"),
        (with_engines({}, {}, goodput=0.4, pending=3), "serious", "; 3 requests waiting"),
        (with_engines({}, {}, goodput=0.4, rejected=7), "serious", "not served in time; 7 rejected"),
        (with_engines({}, {}, failed=1), "warning", "1 request failed"),
        (with_engines({}, {}, {"status": "half-open"}), "warning", "1 of 3 engines out of service: engine-2 half-open"),
        (with_engines({}, {}, placed_alone=5), "serious", "5 requests of the last minute placed by ingresses alone"),
        (msgspec.structs.replace(with_engines({}), lost=["engine-7"]), "warning", "Gone without having been stopped: engine-7."),
        (with_engines({}, {}, hit_rate=0.3, predicted_hit_rate=0.6), "warning", "30% of prompt tokens cached where 60%"),
        (EMPTY["fleet"], "warning", "Pool default has no engine."),
    ],
)  # fmt: skip
def test_trouble_is_named_first(view: FleetView, level: str, word: str) -> None:
    verdict = pool_verdict(view, status())

    assert verdict.level == level
    assert word in verdict.sentence


def test_a_log_without_new_entries_is_told_first() -> None:
    verdict = pool_verdict(with_engines({"status": "ejected"}), status(silent_seconds=14))

    assert verdict[:2] == ("serious", "No entry has come into the log for 14 s: the numbers below are old.")


def test_the_worst_trouble_comes_first_and_no_other_is_lost() -> None:
    view = with_engines({}, {"pace": 3.0}, {"knowledge": "blind"}, failed=2)

    verdict = pool_verdict(view, status("disconnected"))

    assert "no connection" in verdict.sentence
    assert [sentence.split(" ")[0] for sentence in verdict.more] == ["engine-2:", "2", "engine-1:"]


def test_engines_to_look_at_come_worst_first_with_their_reason() -> None:
    view = with_engines(
        {"pace": 3.0}, {}, {"status": "ejected", "status_reason": "5 failures"}, {"knowledge": "degraded"}
    )

    assert [(level, engine.instance, word, reason) for level, engine, word, reason in attention(view)] == [
        ("serious", "engine-2", "ejected", "5 failures"),
        ("warning", "engine-0", "slow", "prefills take 3.0 times what the cost model says"),
        ("warning", "engine-3", "degraded", ""),
    ]


def test_a_list_of_requests_is_judged_by_those_that_ended() -> None:
    view = requests(20)
    words = ["in time"] * 6 + ["late"] + ["left out"] * 10 + ["open"] * 3
    view = msgspec.structs.replace(
        view,
        requests=[msgspec.structs.replace(one, lateness=word) for one, word in zip(view.requests, words, strict=True)],
    )

    assert requests_verdict(view) == Verdict(
        "warning", "Of the newest 20 requests: 6 in time, 1 late, 10 left out, 3 open.", []
    )
    assert requests_verdict(EMPTY["requests"]).sentence == "No request has come by yet."


def test_a_list_of_the_slowest_is_judged_by_the_first() -> None:
    view = requests(10)
    worst = msgspec.structs.replace(view.requests[0], ttft=7.5, slo_ttft=5.0, lateness="late")
    view = msgspec.structs.replace(view, requests=[worst, *view.requests[1:]], matching=321)

    assert requests_verdict(view, slowest=True) == Verdict(
        "warning", "First token after 7.50 s: the slowest of 321 requests, its SLO is 5.00 s.", [], "Late"
    )


def test_a_learned_pace_at_its_bound_is_a_least_value() -> None:
    ((_, _, word, reason),) = attention(with_engines({"pace": 4.0}, {}))

    assert (word, reason) == ("slow", "prefills take at least 4.0 times what the cost model says")


def test_a_run_says_whether_the_change_is_better() -> None:
    verdict = run_verdict(run())

    assert verdict.level == "warning"
    assert verdict.word == "Mixed"
    assert verdict.sentence.startswith("routing least_loaded, 8 engines: effective capacity 92.8% → 97.1% (+4.3%)")
    assert run_verdict(run("failed")).level == "serious"
