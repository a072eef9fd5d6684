"""The timeline of a request: what was known is rebuilt exactly, no second is lost, and the reasons name the cause."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import MigrationRefused, RequestGranted, RequestPlaced
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.subjects import subject_of
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, PoolName, RequestId, Tenant, Term
from pointsman.simulation.replay import pool_settings
from pointsman_cli.explain.causes import Cause
from pointsman_cli.explain.diagnosis import reasons_and_details, verdict
from pointsman_cli.explain.timeline import timeline_of
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.main import main
from tests.support.commands import told_by, written
from tests.support.events import (
    arrived,
    first_token,
    fleet_described,
    given_up,
    given_up_before_each_end,
    joined,
    rejected,
    route,
    told_again_before_each_end,
    with_several_answers,
)
from tests.support.failing_pool import FailingPool
from tests.support.headless import write_headless
from tests.support.hung_ingress import HANGS, with_hung_ingress
from tests.support.ingress_clock import WRONG_CLOCKS, with_ingress_clock
from tests.support.recorded_log import RecordedFleet, rewritten
from tests.support.served_log import ServedLog


@pytest.fixture(scope="module")
def eventful() -> list[LogEntry]:
    """Everything that can happen, under two leaders that are ahead of the log."""
    fleet = RecordedFleet(policy_set(routing="min_ttft", prefill_window_tokens=900), seed=5).live(400)
    fleet.take_over()
    return fleet.live(400).write_all().entries


@pytest.fixture(scope="module")
def slowed() -> list[LogEntry]:
    return ServedLog(pace={"engine-2": 6.0}, gap=0.25, policies=policy_set(routing="round_robin")).entries


def explain(entries: list[LogEntry], directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", "--from", str(written(entries, directory)), *arguments])


def test_a_request_that_the_log_lacks_may_not_have_been_written_where_its_disk_is_full(
    slowed: list[LogEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = explain(slowed, tmp_path, "nobody")
    monkeypatch.setattr(BundleHistory, "fleet", fleet_described(unconfirmed_writes=7, unconfirmed_seconds=42.0))
    stalled = explain(slowed, tmp_path, "nobody")

    assert recorded.exit_code == stalled.exit_code == 2
    assert "no request nobody in this log" in recorded.stderr
    assert "has taken no writes" not in recorded.stderr
    assert "the log has taken no writes for 42 s" in stalled.stderr
    assert "no request nobody in this log" in stalled.stderr


@pytest.mark.parametrize("ahead", WRONG_CLOCKS)
def test_an_ingress_with_a_wrong_clock_changes_nothing_that_is_told(
    ahead: float, slowed: list[LogEntry], tmp_path: Path
) -> None:
    right, wrong = (with_ingress_clock(slowed, clock) for clock in (0.0, ahead))
    for arguments in (["--slowest", "30"], ["r-25"], ["r-60"], ["r-199"]):
        told = explain(right, tmp_path, *arguments)

        assert told.exit_code == 0
        assert explain(wrong, tmp_path, *arguments).stdout == told.stdout


def test_what_was_known_is_rebuilt_to_the_last_bit_of_every_candidate(eventful: list[LogEntry]) -> None:
    settings = pool_settings(eventful)
    placements = [e for e in eventful if isinstance(e.event, RequestPlaced) and e.event.attempt == 1]
    assert len(placements) > 40
    for entry in placements[::3]:
        placed = entry.event
        assert isinstance(placed, RequestPlaced)
        untold = rewritten(eventful, entry.sequence, msgspec.structs.replace(placed, candidates=[]))
        timeline = timeline_of(untold, placed.request, settings)
        decision = next((d for d in timeline.decisions if d.sequence == entry.sequence), None)
        if decision is None:
            assert entry.sequence in timeline.fenced
            continue

        rebuilt = {c.instance: (c.hit_blocks, c.queue_seconds, c.prefill_seconds) for c in decision.candidates}
        for told in placed.candidates:
            assert rebuilt[told.instance] == (told.hit_blocks, told.queue_seconds, told.prefill_seconds)


def crowd(rivals: int | None) -> list[LogEntry]:
    """Twenty engines; the same history whatever is recorded."""
    told = policy_set(routing="min_ttft", prefill_window_tokens=900)
    fleet = RecordedFleet(told, seed=5, engines=20, recording=lambda: Recording(rivals, settings_every=100))
    return fleet.live(60).write_all().entries


def test_of_many_engines_the_nearest_are_listed_and_the_others_are_a_number_and_a_range(tmp_path: Path) -> None:
    whole, short = crowd(None), crowd(3)
    placements = [e.event for e in short if isinstance(e.event, RequestPlaced) and len(e.event.excluded) == 0]
    assert len(placements) > 5

    for placed in placements[::5]:
        told = json.loads(explain(short, tmp_path, placed.request, "--json").stdout)["decisions"][0]
        full = next(e.event for e in whole if isinstance(e.event, RequestPlaced) and e.event.request == placed.request)
        named = {c.instance for c in placed.candidates}
        ttfts = [c.predicted_ttft for c in full.candidates if c.instance not in named]
        (others,) = [one for one in told["others"] if one["weighed"]]

        assert {c["instance"] for c in told["candidates"]} == named
        assert (others["count"], others["ttft_min"], others["ttft_max"]) == (placed.others, min(ttfts), max(ttfts))
        assert told["settings"]["running_max"] == 256
    page = explain(short, tmp_path, placements[-1].request, "--all").stdout
    assert f"and {placements[-1].others} others: first token in " in page


def test_a_move_that_was_refused_says_who_wanted_it_and_why_it_was_not_made(
    eventful: list[LogEntry], tmp_path: Path
) -> None:
    entry = next(e for e in eventful if isinstance(e.event, MigrationRefused))
    assert isinstance(entry.event, MigrationRefused)
    moved = msgspec.structs.replace(entry.event, policy="dualmap_pair", plan="rebalancer-1.7", benefit=1.5)
    log = rewritten(eventful, entry.sequence, moved)
    log.append(LogEntry(len(log) + 1, entry.subject, entry.payload, moved))  # written twice

    told = json.loads(explain(log, tmp_path, moved.request, "--json").stdout)
    shown = explain(log, tmp_path, moved.request, "--all").output

    refused = [move for move in told["refused_moves"] if move["plan"] == "rebalancer-1.7"]
    assert [(move["sequence"], move["reason"], move["detail"]) for move in refused] == [
        (entry.sequence, moved.reason, moved.detail)
    ]
    assert f"from {moved.source} to {moved.instance}: {moved.reason}, {moved.detail}" in shown
    assert "dualmap_pair had asked for it: 1.500 s sooner" in shown
    assert any("requested a move" in reason for reason in [*told["why"], *told["also"]])
    assert "requested a move" not in told["verdict"]["sentence"]


def test_the_phases_of_every_request_leave_no_second_out(eventful: list[LogEntry]) -> None:
    settings = pool_settings(eventful)
    requests = dict.fromkeys(e.event.request for e in eventful if isinstance(e.event, RequestArrived))
    for request in list(requests)[::4]:
        timeline = timeline_of(eventful, request, settings)
        if timeline.end is None or not timeline.phases:
            continue
        assert sum(p.seconds for p in timeline.phases) == pytest.approx(
            max(0.0, timeline.end.at - timeline.arrived_at), abs=1e-6
        )


def test_the_slowest_request_of_a_slow_engine_says_so(slowed: list[LogEntry], tmp_path: Path) -> None:
    told = json.loads(explain(slowed, tmp_path, "--slowest", "1", "--json").stdout)

    assert told["decisions"][0]["instance"] == "engine-2"
    assert told["verdict"]["cause"] == "slow_engine"
    assert "passed at engine-2" in told["why"][0]
    assert any("it was engine-2 alone" in reason for reason in told["why"])
    within = [e for e in slowed if told["grants"][0]["sequence"] < e.sequence < _first_token_of(told)]
    others = [e.event for e in within if isinstance(e.event, PrefillFinished) and e.event.instance != "engine-2"]
    assert told["meanwhile"]["prefills"] == len(others)
    shown = explain(slowed, tmp_path, told["request"], "--all")
    assert shown.exit_code == 0
    for part in ("where the time went", "to the first token", "by round_robin", "PrefillFinished"):
        assert part in shown.output
    assert re.search(r"predicted +real", shown.output), "the table of what was predicted"


def _first_token_of(told: dict[str, Any]) -> int:
    sequence: int = next(e["sequence"] for e in told["events"] if e["event"]["type"] == "PrefillFinished")
    return sequence


def test_a_wait_in_the_queue_names_who_was_ahead() -> None:
    log = ServedLog(
        requests=80,
        gap=0.05,
        engines=1,
        policies=policy_set(routing="min_ttft", admission="none", prefill_window_tokens=300),
    )
    timeline = timeline_of(log.entries, RequestId("r-60"), pool_settings(log.entries))

    assert timeline.placement is not None
    assert timeline.placement.ahead
    assert "which were before it on engine-1" in reasons_and_details(timeline)[0][0]


@pytest.mark.parametrize("other", [{"role": "decode"}, {"max_model_len": 100}])
def test_an_engine_that_cannot_serve_a_request_was_not_idle_for_it(other: dict[str, Any]) -> None:
    log = ServedLog(requests=80, gap=0.05, engines=1, policies=policy_set(routing="min_ttft", admission="none"))
    arrival = next(e for e in log.entries if isinstance(e.event, RequestArrived) and e.event.request == "r-60")
    assert isinstance(arrival.event, RequestArrived)
    longer = msgspec.structs.replace(arrival.event, context_tokens=200)
    told = rewritten(rewritten(log.entries, 3, joined("other", **other)), arrival.sequence, longer)

    timeline = timeline_of(told, RequestId("r-60"), pool_settings(told))

    assert timeline.placement is not None
    assert {c.instance: c.status for c in timeline.placement.candidates} == {"engine-1": "ready", "other": "unsuited"}
    assert verdict(timeline).cause is Cause.OVERLOAD
    assert not [sentence for sentence in reasons_and_details(timeline)[0] if "other " in sentence]
    assert ("other" in timeline.grants[-1].corrections) is ("role" not in other)


def test_requests_that_were_given_up_behind_their_first_tokens_change_no_verdict(
    slowed: list[LogEntry],
) -> None:
    log = slowed[: len(slowed) // 2]
    late = max((e.event for e in log if isinstance(e.event, RequestFinished)), key=lambda event: event.ttft)
    settings = pool_settings(log)
    plain, told = (timeline_of(some, late.request, settings) for some in (log, given_up_before_each_end(log)))

    assert plain.delivered
    assert told.delivered == plain.delivered
    assert verdict(told) == verdict(plain)
    assert verdict(plain).cause is Cause.SLOW_ENGINE


def test_a_sum_of_cached_tokens_for_several_answers_or_prompts_makes_no_index_stale() -> None:
    emptied = {"engine-1": 10.0, "engine-2": 10.0, "engine-3": 10.0}
    log = ServedLog(requests=80, gap=0.2, emptied=emptied, policies=policy_set(routing="round_robin")).entries
    settings = pool_settings(log)
    ends = [entry.event for entry in log if isinstance(entry.event, RequestFinished)]
    plain, several = (
        [timeline_of(some, end.request, settings) for end in ends[-60:]] for some in (log, with_several_answers(log))
    )

    assert any(verdict(timeline).cause is Cause.STALE_INDEX for timeline in plain)
    assert any(timeline.delivered for timeline in plain)
    assert not any(verdict(timeline).cause is Cause.STALE_INDEX for timeline in several)
    assert not any("stale" in reason for timeline in several for reason in reasons_and_details(timeline)[0])


def test_a_first_token_that_came_while_its_ingress_hung_blames_no_engine() -> None:
    served = ServedLog(gap=0.1, requests=300, policies=policy_set(routing="round_robin"))
    log = with_hung_ingress(served.entries)
    lost = [entry.event.request for entry in log if isinstance(entry.event, RequestCancelled)]
    plain, told = (
        [verdict(timeline_of(entries, request, served.state.settings)) for request in lost]
        for entries in (served.entries, log)
    )

    assert len(told) == len(HANGS)
    assert all(found.cause is Cause.TRANSPORT and "because its ingress hung: " in found.sentence for found in told)
    assert not any("hung" in found.sentence for found in plain)


def test_where_the_log_has_lost_its_beginning_nothing_is_said_of_what_is_not_known(
    slowed: list[LogEntry], tmp_path: Path
) -> None:
    policies = policy_set(routing="round_robin")
    late = next(
        e for e in slowed if e.sequence > 600 and isinstance(e.event, RequestPlaced) and e.event.instance == "engine-2"
    )
    under_way = next(e for e in slowed if e.sequence > 600 and isinstance(e.event, RequestFinished))
    assert isinstance(late.event, RequestPlaced)
    assert isinstance(under_way.event, RequestFinished)
    settings = pool_settings(slowed)
    blind = write_headless(tmp_path / "blind.pmlog", slowed, 600, settings=settings)
    known = write_headless(tmp_path / "known.pmlog", slowed, 590, settings=settings, checkpoint=(600, policies))

    def told(file: Path, request: str) -> dict[str, Any]:
        return told_by("explain", request, "--from", str(file))

    seen, unseen, ended = (
        told(known, late.event.request),
        told(blind, late.event.request),
        told(blind, under_way.event.request),
    )
    assert {weighed["status"] for weighed in seen["decisions"][0]["candidates"]} == {"ready"}
    assert {weighed["status"] for weighed in unseen["decisions"][0]["candidates"]} == {"not known"}
    assert any("slow before" in reason for reason in seen["why"])
    assert not any("slow before" in reason or "unusual" in reason for reason in unseen["why"])
    assert "finished on" in ended["headline"]
    assert ended["phases"][0]["kind"] == "gone"


def _with_an_outage(slowed: list[LogEntry], *, begins: int) -> list[LogEntry]:
    """The log from an entry on, and behind it a request that waited 4 s for a scheduler, until its ingress placed it alone."""
    at, alone = slowed[-1].event.at if slowed[-1].event else 0.0, RequestId("alone")
    told: list[LogEvent] = [
        RequestGranted(at=at + 5.0, request=alone, instance=InstanceId("engine-1"), tenant=Tenant("acme")),
        PrefillFinished(at=at + 5.4, request=alone, instance=InstanceId("engine-1"), ttft=4.4, prefill=0.4),
        RequestFinished(
            at=at + 6.0, request=alone, instance=InstanceId("engine-1"), e2e=5.0, prompt_tokens=300, completion_tokens=9,
            cached_tokens=0, ttft=4.4, tpot=0.1,
        ),
    ]  # fmt: skip
    entries = slowed[begins - 1 :]
    for event in told:
        entries.append(LogEntry.read(entries[-1].sequence + 1, subject_of(PoolName("default"), event), encode(event)))
    return entries


@pytest.mark.parametrize("begins", [1, 600])
def test_a_request_that_an_ingress_placed_alone_waited_for_a_scheduler_also_where_the_log_lost_its_beginning(
    slowed: list[LogEntry], begins: int
) -> None:
    entries = _with_an_outage(slowed, begins=begins)
    settings = pool_settings(slowed)
    timeline, open_still, unheard = (
        timeline_of(log, RequestId("alone"), settings)
        for log in (entries, entries[:-2], [entry for entry in entries if not isinstance(entry.event, RequestGranted)])
    )

    assert not timeline.arrived_before_the_log
    assert not open_still.arrived_before_the_log
    assert not unheard.arrived_before_the_log
    assert timeline.phases[0].name == "to the scheduler"
    assert timeline.phases[0].seconds == pytest.approx(4.0)
    assert verdict(timeline).cause is Cause.NO_SCHEDULER


def test_the_slowest_of_a_log_are_also_those_that_an_ingress_placed_alone(
    slowed: list[LogEntry], tmp_path: Path
) -> None:
    fast = ServedLog(requests=20).entries
    entries = _with_an_outage(fast, begins=1)

    slowest = json.loads(explain(entries, tmp_path, "--slowest", "3", "--json").stdout)["slowest"]
    shown = explain(entries, tmp_path, "--slowest", "3").output

    assert (slowest[0]["request"], slowest[0]["ttft"], slowest[0]["tenant"]) == ("alone", 4.4, "acme")
    assert slowest[0]["granted_at"] - slowest[0]["arrived_at"] == pytest.approx(4.0)
    assert slowest[0]["prompt_tokens"] == 300
    assert all(row["request"] != "alone" for row in slowest[1:])
    assert re.search(r"alone .*engine-1 .*acme .*4.400 s .* - .*4.000 s .*0.400 s .*300", shown)


def test_a_grant_that_an_ingress_tells_a_new_leader_changes_nothing_that_is_told(
    slowed: list[LogEntry], tmp_path: Path
) -> None:
    settings, again = pool_settings(slowed), told_again_before_each_end(slowed)
    for request in ("r-25", "r-60", "r-199"):
        plain, told = (timeline_of(log, RequestId(request), settings) for log in (slowed, again))

        assert len(told.entries) == len(plain.entries) + 1
        assert told.phases == plain.phases
        assert [grant.after_seconds for grant in told.grants] == [grant.after_seconds for grant in plain.grants]
        assert verdict(told) == verdict(plain)
    assert explain(again, tmp_path, "--slowest", "30").stdout == explain(slowed, tmp_path, "--slowest", "30").stdout


def test_the_slowest_are_also_those_that_were_refused_failed_or_were_given_up(
    slowed: list[LogEntry], tmp_path: Path
) -> None:
    """Longer than any other: a wait is to the first token or, without one, to the end, by the leader's clock."""
    at, stamp = slowed[-1].event.at if slowed[-1].event else 0.0, Stamp(term=Term(1), number=90_000, as_of=0)
    told: list[LogEvent] = [
        *(arrived(name, at=at, arrived_at=at) for name in ("held", "lost", "cut")),
        arrived("failed", at=at, arrived_at=at + 3600.0, sent_at=at + 3600.0),
        RequestGranted(at=at + 1.0, request=RequestId("failed"), instance=InstanceId("engine-1")),
        replace(first_token("cut", "engine-1", at=at + 0.2), ttft=0.2),
        RequestFailed(at=at + 3600.0 + 50.0, request=RequestId("failed"), reason="engine_failed", status=502),
        rejected("held", "no_instance", at=at + 60.0, stamp=stamp),
        given_up("lost", at=at + 40.0, number=90_001),
        RequestFailed(at=at + 90.0, request=RequestId("cut"), reason="engine_failed", status=502),
    ]
    entries = list(slowed)
    for event in told:
        entries.append(LogEntry.read(entries[-1].sequence + 1, subject_of(PoolName("default"), event), encode(event)))

    slowest = json.loads(explain(entries, tmp_path, "--slowest", "300", "--json").stdout)["slowest"]
    shown = explain(entries, tmp_path, "--slowest", "3").output
    waited = {row["request"]: (row["waited"], row["ttft"]) for row in slowest}

    assert [row["request"] for row in slowest[:3]] == ["held", "failed", "lost"]
    assert [waited[name][0] for name in ("held", "failed", "lost")] == pytest.approx([60.0, 50.0, 40.0])
    assert waited["failed"][1] is None
    assert waited["cut"] == (0.2, 0.2), "it was cut off later, but did not begin late"
    assert re.search(r"held .*rejected .*60.0 s", shown)
    assert re.search(r"failed .*engine-1 .*failed .*50.0 s .*1.000 s .*49.0 s", shown)
    assert re.search(r"lost .*cancelled .*40.0 s", shown)


def test_ids_may_be_cut_but_must_mean_one_request(slowed: list[LogEntry], tmp_path: Path) -> None:
    def said(text: str) -> dict[str, Any]:
        result = explain(slowed, tmp_path, text, "--json")
        return {"code": result.exit_code, "text": result.output}

    assert '"request": "r-199"' in said("199")["text"]
    assert '"request": "r-1"' in said("r-1")["text"]
    ambiguous, unknown = said("r-15"), said("nobody")
    assert ambiguous["code"] == 0
    assert said("r-")["code"] == 2
    assert "Type more" in said("r-")["text"]
    assert (unknown["code"], "x-request-id" in unknown["text"]) == (2, True)


def test_a_request_is_found_by_the_id_of_its_client(slowed: list[LogEntry], tmp_path: Path) -> None:
    log = slowed
    for entry in slowed:
        event = entry.event
        if isinstance(event, RequestArrived) and (
            own := {"r-7": "mine", "r-8": "both", "r-9": "both"}.get(event.request)
        ):
            log = rewritten(log, entry.sequence, msgspec.structs.replace(event, client_request_id=own))

    assert '"request": "r-7"' in explain(log, tmp_path, "mine", "--json").output
    both = explain(log, tmp_path, "both")
    assert (both.exit_code, "both was sent with 2 requests: r-8, r-9" in both.output) == (2, True)


def test_each_failed_attempt_is_told_and_why_an_ejected_engine_was_no_candidate(tmp_path: Path) -> None:
    pool = FailingPool()
    pool.serve(40, sick=InstanceId("a"))
    failed = next(e.event.request for e in pool.log if isinstance(e.event, RequestAttemptFailed))
    first, late = (json.loads(explain(pool.log, tmp_path, request, "--json").stdout) for request in (failed, "r40"))

    assert (
        "a failed it 0.010 s after its arrival (attempt 1): it answered with an error, 500 Internal Server Error"
        in (first["why"])
    )
    assert [attempt["instance"] for attempt in first["failed_attempts"]] == ["a"]
    pool.later(5)
    pool.look()
    trial, _ = pool.asks()
    tried = json.loads(explain(pool.log, tmp_path, trial, "--json").stdout)
    assert tried["why"][0].startswith(
        "it was to try a after its ejection, which was half-open, takes one request at a time"
    )
    assert (
        "a was no candidate: ejected for 5 s, consecutive_failures: 5 requests in a row failed there: 500 Internal Server "
        "Error"
    ) in late["why"]


def test_a_request_that_came_again_under_another_id_says_which_engines_failed_it_before() -> None:
    """Also under the first of several ids."""
    pool = FailingPool()
    request, sick = pool.asks()
    ids, failed = [request], [sick]
    for again in ("again", "once more"):
        pool.later(5.0)
        pool.happens(given_up(request, at=pool.now, instance=sick, as_of=pool.state.sequence))
        pool.later(1.0)
        pool.fails(request, sick, "first_byte_timeout")
        command = route(
            again, [1], arrived_at=pool.now - 6.0, sent_at=pool.now, attempt=2, excluded=[InstanceId(sick)],
            instead_of=RequestId(request),
        )  # fmt: skip
        pool.decides(pool.dispatcher.route(command, pool.now))
        request, sick = again, pool.at_of(again)
        ids.append(again)
        failed.append(sick)
    pool.answers(request, sick)
    timeline = timeline_of(pool.log, RequestId(request), pool.state.settings)

    assert [(event.request, event.instance) for event in timeline.failed] == list(zip(ids[:2], failed[:2], strict=True))
    assert verdict(timeline).cause is Cause.FAILED_ATTEMPTS
    assert (
        f"{failed[1]} failed it (its first byte did not come in time) and 1 attempt before"
        in verdict(timeline).sentence
    )
    assert timeline.phases[0].name == "as request again"
    forged = [
        replace(entry, event=replace(entry.event, instead_of=RequestId(request)))
        if isinstance(entry.event, RequestArrived) and entry.event.request == ids[0]
        else entry
        for entry in pool.log
    ]
    assert timeline_of(forged, RequestId(request), pool.state.settings).failed == timeline.failed
