"""`pointsman usage`: sums by a second, slower count; alike from every kind of file; safe as CSV."""

import csv
import io
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestRejected,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.reasons import CancelCause, RejectReason
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.subjects import subject_of
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import ANCHOR_UNIX_SECONDS, EngineSeconds, InstanceId, PoolName, RequestId, Tenant, Term
from pointsman.simulation.replay import fold
from pointsman.state.workload import Stage
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.sources import Header
from pointsman_cli.history.time_options import Moment
from pointsman_cli.main import main
from pointsman_cli.usage import accounting
from pointsman_cli.usage.accounting import Group, TooManyGroupsError, Usage, UsageAccount
from tests.support import events
from tests.support.commands import told_by, written
from tests.support.events import given_up, joined, rejected
from tests.support.headless import write_headless
from tests.support.hostile import FORMULA, assert_harmless
from tests.support.recorded_log import RecordedFleet
from tests.support.served_log import ServedLog
from tests.unit.cli.test_history import archived

POOL = PoolName("default")
DAY = 24 * 3600.0
NOON = ANCHOR_UNIX_SECONDS + DAY / 2
ENGINE, OTHER = InstanceId("engine-1"), InstanceId("engine-2")


def log_of(*events: LogEvent) -> list[LogEntry]:
    return [
        LogEntry.read(number, subject_of(POOL, event), encode(event)) for number, event in enumerate(events, 1)
    ]  # fmt: skip


def arrived(request: str, at: EngineSeconds, tenant: str = "acme", **fields: Any) -> RequestArrived:
    return events.arrived(request, at=at, tenant=tenant, **fields)


def granted(request: str, at: EngineSeconds, instance: InstanceId = ENGINE, **fields: Any) -> RequestGranted:
    return RequestGranted(at=at, request=RequestId(request), instance=instance, **fields)


def first_token(request: str, at: EngineSeconds, *, sent_at: EngineSeconds, instance: InstanceId = ENGINE) -> LogEvent:
    return PrefillFinished(at=at, request=RequestId(request), instance=instance, ttft=at - 1, prefill=at - sent_at)


def finished(
    request: str,
    at: EngineSeconds,
    tokens: tuple[int, int, int] = (100, 64, 7),
    *,
    first_at: EngineSeconds | None = None,
) -> RequestFinished:
    """Arrived at 1. `first_at`: None unless it is streamed."""
    prompt, cached, output = tokens
    counts = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": output}
    ttft = (at if first_at is None else first_at) - 1
    return events.finished(request, ENGINE, at=at, e2e=at - 1, ttft=ttft, tpot=0.1, **counts)


def counted(*events: LogEvent, by: tuple[accounting.Dimension, ...] = ()) -> UsageAccount:
    account = UsageAccount(1.0, by)
    account.read(log_of(*events))
    return account


def report(*arguments: str) -> dict[str, Any]:
    return told_by("usage", *arguments)


# --- What counts ---


def test_an_end_by_the_ingress_replaces_that_of_a_leader_that_gave_the_request_up() -> None:
    begun: list[LogEvent] = [arrived("r", 1), granted("r", 3)]
    lost = given_up("r", at=4, instance=ENGINE)

    answered: list[LogEvent] = [first_token("r", 5, sent_at=3), finished("r", 9, first_at=5)]

    assert counted(*begun, lost, *answered).total == counted(*begun, *answered).total
    assert counted(*begun, lost).total.cancelled == 1


def test_a_request_that_comes_again_under_another_id_counts_once() -> None:
    lost: list[LogEvent] = [arrived("r", 1), given_up("r", at=4, instance=ENGINE)]
    again: list[LogEvent] = [arrived("s", 5, instead_of="r"), granted("s", 6), finished("s", 9)]

    assert counted(*lost, *again).total == counted(*again).total
    assert counted(*lost, arrived("s", 5, tenant="other", instead_of="r"), finished("s", 9)).total.requests == 2
    assert counted(arrived("r", 1), finished("r", 4), *again).total.requests == 2, "it had its answer"


def test_what_a_request_cost_counts_in_the_span_in_which_it_ended_though_it_was_given_up_before() -> None:
    lost: list[LogEvent] = [arrived("r", 1), granted("r", 3), given_up("r", at=4, instance=ENGINE)]
    events = log_of(*lost, finished("r", 9))
    first, second = UsageAccount(1.0, ()), UsageAccount(1.0, ())

    first.read(events[: len(lost)])
    second.read(events, since=Moment(sequence=len(lost) + 1))

    assert (first.total.cancelled, first.total.output_tokens) == (1, 0)
    assert (second.total.finished, second.total.output_tokens) == (1, 7)


def test_a_request_that_decodes_at_the_checkpoint_has_prefilled_before(tmp_path: Path) -> None:
    served = ServedLog(requests=20)
    events = [entry.event for entry in served.entries]
    gone = next(n for n, event in enumerate(events, 1) if n > len(events) // 2 and isinstance(event, PrefillFinished))
    state = fold(served.entries[:gone], settings=served.state.settings)
    decoding = [request.id for request in state.workload.requests.values() if request.stage is Stage.DECODING]
    account = UsageAccount(1.0, ())
    account.begin(state)

    account.read([e for e in served.entries[gone:] if getattr(e.event, "request", None) in decoding])

    first = {event.request: event.at for event in events if isinstance(event, PrefillFinished)}
    ends = {event.request: event.at for event in events if isinstance(event, RequestFinished)}
    assert decoding
    assert account.total.decode_seconds == pytest.approx(sum(ends[name] - first[name] for name in decoding), rel=0.3)


def test_a_finished_request_counts_the_engines_tokens_and_its_time_on_the_engine() -> None:
    usage = counted(
        arrived("r", 1), granted("r", 3), first_token("r", 5, sent_at=3), finished("r", 9, first_at=5)
    ).total

    assert usage == Usage(
        requests=1,
        finished=1,
        computed_tokens=36,
        cached_tokens=64,
        output_tokens=7,
        prefill_seconds=2.0,
        decode_seconds=4.0,
    )
    assert usage.engine_seconds == 6.0


def test_an_answer_that_is_not_streamed_is_all_prefill() -> None:
    assert counted(arrived("r", 1), granted("r", 3), finished("r", 9)).total.prefill_seconds == 6.0


def test_failed_and_cancelled_requests_count_no_tokens_but_their_time_on_engines() -> None:
    failed = RequestFailed(at=8.0, request=RequestId("f"), reason="x", status=502)
    cancelled = RequestCancelled(at=9.0, request=RequestId("c"), reason="x", cause=CancelCause.CLIENT_GONE)

    usage = counted(
        arrived("f", 1), granted("f", 2), first_token("f", 6, sent_at=2), failed, arrived("c", 1), granted("c", 4), cancelled,
        arrived("j", 1), rejected("j", RejectReason.QUEUE_FULL, at=3.0),
    ).total  # fmt: skip

    assert usage == Usage(requests=3, failed=1, cancelled=1, rejected=1, prefill_seconds=4.0 + 5.0, decode_seconds=2.0)


def test_streams_that_broke_off_count_what_was_delivered() -> None:
    failed = RequestFailed(at=8.0, request=RequestId("f"), reason="x", status=502, output_tokens=20)
    cancelled = RequestCancelled(
        at=9.0, request=RequestId("c"), reason="x", cause=CancelCause.CLIENT_GONE, output_tokens=1_000
    )

    usage = counted(arrived("f", 1), failed, arrived("c", 1), cancelled).total

    assert usage == Usage(requests=2, failed=1, cancelled=1, output_tokens=1_020)


def test_every_attempt_counts_its_time() -> None:
    failed = RequestAttemptFailed(at=5.0, request=RequestId("r"), instance=ENGINE, failure="http_5xx")

    usage = counted(
        arrived("r", 1),
        granted("r", 2),
        failed,
        granted("r", 7, OTHER, attempt=2),
        first_token("r", 8, sent_at=7, instance=OTHER),
        finished("r", 10, first_at=8),
    ).total

    assert (usage.prefill_seconds, usage.decode_seconds) == (3.0 + 1.0, 2.0)


def test_a_request_taken_out_of_its_engine_leaves_it_then() -> None:
    moved = RequestMigrated(
        at=5.0, request=RequestId("r"), source=ENGINE, instance=OTHER, hit_blocks=0, uncached_tokens=1,
        prefill_seconds=0.0, predicted_ttft=1.0, policy="p", reason="", benefit=1.0, plan="1", planned_as_of=1, rebound=True,
    )  # fmt: skip

    usage = counted(arrived("r", 1), granted("r", 2), moved, granted("r", 6, OTHER), finished("r", 10)).total

    assert usage.prefill_seconds == 3.0 + 4.0


def test_a_split_request_prefills_until_it_is_handed_over() -> None:
    over = RequestHandedOver(at=5.0, request=RequestId("r"), source=ENGINE, instance=OTHER)

    usage = counted(
        arrived("r", 1), granted("r", 2), over, first_token("r", 5.5, sent_at=5, instance=OTHER), finished("r", 9)
    ).total

    assert (usage.prefill_seconds, usage.decode_seconds) == (3.0, 4.0)


def with_ingress_ahead(events: Iterable[LogEvent], seconds: EngineSeconds) -> Iterator[LogEvent]:
    """A day later. Whatever has no stamp is the ingress's. Durations stay."""
    for event in events:
        if isinstance(event, RequestArrived):
            yield replace(event, at=DAY + event.at, arrived_at=DAY + event.arrived_at + seconds)
        else:
            yield replace(event, at=DAY + event.at + (seconds if event.stamp is None else 0.0))


@pytest.mark.parametrize("ahead", [-3_600.0, -2.0, 2.0, 3_600.0])
def test_an_ingress_with_a_wrong_clock_changes_no_time_on_engines(ahead: EngineSeconds) -> None:
    by_leader = Stamp(term=Term(1), number=1, as_of=0)
    failure = RequestAttemptFailed(at=4.0, request=RequestId("r"), instance=ENGINE, failure="http_5xx")
    gone = RequestCancelled(at=9.0, request=RequestId("c"), reason="x", cause=CancelCause.CLIENT_GONE)
    broken = RequestFailed(at=8.0, request=RequestId("f"), reason="x", status=502)
    assumed = PrefillFinished(
        at=3.5, request=RequestId("u"), instance=ENGINE, ttft=2.5, prefill=1.5, stamp=by_leader
    )  # not streamed
    events: list[LogEvent] = [
        *(arrived(name, 1) for name in "rcfu"),
        *(granted(name, 2, stamp=by_leader) for name in "rcfu"),
        failure, granted("r", 5, stamp=by_leader), first_token("r", 7, sent_at=5), finished("r", 11, first_at=7),
        gone,
        first_token("f", 6, sent_at=2), broken,
        assumed, finished("u", 10),
    ]  # fmt: skip
    served = [entry.event for entry in ServedLog(requests=60).entries if entry.event is not None]

    for log in (events, served):
        right, wrong = (counted(*with_ingress_ahead(log, by)).total for by in (0.0, ahead))
        assert right.prefill_seconds == pytest.approx(wrong.prefill_seconds)
        assert right.decode_seconds == pytest.approx(wrong.decode_seconds)
    assert (counted(*events).total.prefill_seconds, counted(*events).total.decode_seconds) == (
        (2 + 2) + 7 + 4 + 1.5,
        4 + 2 + 6.5,
    )


def test_an_ingress_whose_clock_is_set_while_it_answers_says_by_itself_how_long_it_took() -> None:
    events = [arrived("r", 1), granted("r", 3), first_token("r", 5, sent_at=3), finished("r", 9, first_at=5)]
    events[3] = replace(events[3], at=9.0 + 3_600)

    usage = counted(*events).total

    assert (usage.prefill_seconds, usage.decode_seconds) == (2.0, 4.0)


def test_without_counts_of_the_engine_the_prompt_of_the_arrival_counts_as_computed() -> None:
    usage = counted(arrived("r", 1), granted("r", 2), finished("r", 3, (-1, -1, -1))).total

    assert (usage.computed_tokens, usage.cached_tokens, usage.output_tokens, usage.uncounted) == (100, 0, 0, 1)


def test_a_second_end_a_second_grant_and_a_deposed_leader_change_nothing() -> None:
    old = Stamp(term=Term(1), number=1, as_of=0)
    elected = LeaderElected(at=1.0, term=Term(2), scheduler="s", as_of=0)
    rest = (granted("r", 2), granted("r", 3), finished("r", 4), finished("r", 9), granted("r", 20))

    once = counted(elected, arrived("r", 1), *rest, granted("x", 1, stamp=old), arrived("x", 1, stamp=old))

    assert once.total.requests == 1
    assert once.total.engine_seconds == 2.0
    assert once.in_flight == 0


def test_what_a_leader_writes_after_the_end_counts_as_if_it_had_come_in_order() -> None:
    ends = finished("r", 9)
    in_order = counted(arrived("r", 1), granted("r", 3), ends, by=("tenant",))
    late = counted(ends, granted("r", 3), arrived("r", 1), by=("tenant",))

    assert late.groups == in_order.groups
    assert late.unattributed == 0


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where noon of UTC is in the next day."""
    with monkeypatch.context() as there:
        there.setenv("TZ", "XXX-14")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_days_are_utc_models_are_adapters_or_the_pools_and_nobody_knows_some_tenants() -> None:
    account = counted(
        joined("engine-1", at=NOON, model="base"),
        arrived("a", NOON), granted("a", NOON), finished("a", NOON + DAY),
        arrived("b", NOON, adapter="poet"), granted("b", NOON), finished("b", NOON),
        granted("c", NOON), finished("c", NOON),
        granted("d", NOON, tenant="blind", adapter="poet"), finished("d", NOON),
        by=accounting.DIMENSIONS,
    )  # fmt: skip

    noon = datetime.fromtimestamp(NOON, UTC).date()
    assert [(group.tenant, group.model, (group.day - noon).days) for group, _ in account.rows() if group.day] == [
        ("", "base", 0), ("acme", "poet", 0), ("blind", "poet", 0), ("acme", "base", 1),
    ]  # fmt: skip
    assert account.unattributed == 1


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "GROUPS_MAX", 2)
    events = [event for n in range(3) for event in (arrived(f"r{n}", 1, f"t{n}"), finished(f"r{n}", 2))]

    assert len(counted(*events).groups) == 1
    with pytest.raises(TooManyGroupsError):
        counted(*events, by=("tenant",))


# --- Against a second count, and from every kind of file ---


def twice_counted(entries: list[LogEntry]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """By reading the whole log for each request."""
    events = [entry.event for entry in entries if entry.event is not None]
    tenants = {event.request: event.tenant for event in events if isinstance(event, RequestArrived)}
    total: Counter[str] = Counter()
    by_tenant: dict[str, Counter[str]] = {}
    seen: set[str] = set()
    for event in events:
        if not isinstance(event, RequestFinished | RequestFailed | RequestCancelled | RequestRejected):
            continue
        if event.request in seen:
            continue
        seen.add(event.request)
        one = Counter(requests=1)
        if isinstance(event, RequestFinished):
            one += Counter(
                finished=1, computed_tokens=max(0, event.prompt_tokens - event.cached_tokens),
                cached_tokens=event.cached_tokens, output_tokens=event.completion_tokens,
            )  # fmt: skip
        total += one
        by_tenant[tenants.get(event.request, "")] = by_tenant.get(tenants.get(event.request, ""), Counter()) + one
    return total, by_tenant


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sums_are_those_of_a_second_count(seed: int) -> None:
    entries = (
        RecordedFleet(policy_set(prefill_window_tokens=900), seed=seed, failing=True).live(900).write_all().entries
    )
    account = UsageAccount(1.0, ("tenant",))
    account.read(entries)

    total, by_tenant = twice_counted(entries)
    for name, value in total.items():
        assert getattr(account.total, name) == value, name
    assert {group.tenant for group in account.groups} == set(by_tenant)
    for tenant, expected in by_tenant.items():
        usage = account.groups[Group(tenant=Tenant(tenant))]
        assert {name: getattr(usage, name) for name in expected} == dict(expected)


def test_a_fleet_in_order_is_as_long_on_its_engines_as_it_says() -> None:
    entries = ServedLog(requests=60).entries
    account = UsageAccount(1.0, ())
    account.read(entries)
    events = [entry.event for entry in entries]
    starts = {event.request: event.at for event in events if isinstance(event, RequestGranted)}
    spent = sum(event.at - starts[event.request] for event in events if isinstance(event, RequestFinished))

    assert account.total.engine_seconds == pytest.approx(spent)
    assert account.total.decode_seconds > 0


def test_bundle_and_archive_and_both_halves_give_the_same_numbers(tmp_path: Path) -> None:
    entries = RecordedFleet(policy_set(prefill_window_tokens=900), seed=4).live(700).write_all().entries
    bundle, last = written(entries, tmp_path), entries[-1].sequence
    archive = archived(tmp_path / "archive.sqlite", ("2026", 1, entries, ""))

    reports = [report("--from", place) for place in (str(bundle), archive)]
    halves = [
        report("--from", archive, *span) for span in (("--until", str(last // 2)), ("--since", str(last // 2 + 1)))
    ]

    assert reports[0]["rows"] == reports[1]["rows"]
    assert reports[0]["total"]["finished"] > 20
    for name in ("requests", "finished", "computed_tokens", "output_tokens"):
        assert sum(half["total"][name] for half in halves) == reports[0]["total"][name]
    assert sum(row["engine_seconds"] for row in reports[0]["rows"]) == pytest.approx(
        reports[0]["total"]["engine_seconds"], abs=0.1
    )


def test_csv_has_no_formula_and_one_line_for_each_row(tmp_path: Path) -> None:
    tenants = [FORMULA, "a\nb", "\x1b[2J", "acme"]
    events = [e for n, name in enumerate(tenants) for e in (arrived(f"r{n}", 1, name), finished(f"r{n}", 2))]
    write_bundle(tmp_path / "log.pmlog", Header(), log_of(*events))

    ran = CliRunner().invoke(main, ["usage", "--from", str(tmp_path / "log.pmlog"), "--csv", "--by", "tenant"])
    rows = list(csv.DictReader(io.StringIO(ran.stdout)))

    assert_harmless(ran.stdout)
    assert len(rows) == 4
    assert {row["tenant"][:2] for row in rows} == {"'=", "a\ufffd", "\ufffd[", "ac"}
    assert {row["computed_tokens"] for row in rows} == {"36"}


def test_what_the_rows_of_the_csv_leave_out_is_told_beside_it(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pmlog"
    write_bundle(whole, Header(), log_of(finished("old", 1), arrived("a", 2), finished("a", 3), arrived("late", 4)))
    served = ServedLog(requests=20)
    headless = write_headless(tmp_path / "headless.pmlog", served.entries, 10, settings=served.state.settings)

    told, cut = (CliRunner().invoke(main, ["usage", "--from", str(file), "--csv"]) for file in (whole, headless))

    assert len(list(csv.DictReader(io.StringIO(told.stdout)))) == 2
    assert "1 request in flight at the end" in told.stderr
    assert "1 request arrived before the log" in told.stderr
    assert "what was known before is missing" in cut.stderr


@pytest.mark.parametrize("wrong", [("--by", "colour"), ("--by", ","), ("--csv", "--json"), ("--since", "never")])
def test_what_cannot_be_is_refused(wrong: tuple[str, ...], tmp_path: Path) -> None:
    write_bundle(tmp_path / "log.pmlog", Header(), log_of(arrived("r", 1)))

    assert CliRunner().invoke(main, ["usage", "--from", str(tmp_path / "log.pmlog"), *wrong]).exit_code == 2


def test_a_log_that_lost_its_beginning_counts_its_requests_in_flight_by_the_checkpoint(tmp_path: Path) -> None:
    served = ServedLog(requests=120)
    entries = served.entries
    gone = len(entries) // 2
    whole = written(entries, tmp_path)
    headless = write_headless(
        tmp_path / "headless.pmlog",
        entries,
        gone,
        settings=served.state.settings,
        checkpoint=(gone + 1, served.policies),
    )

    ours, theirs = report("--from", str(headless)), report("--from", str(whole), "--since", str(gone + 2))

    assert ours["beginning"].endswith("with a checkpoint of what was known then")
    assert ours["unattributed"] == 0
    assert ours["total"]["finished"] > 30
    counts = ("requests", "finished", "computed_tokens", "cached_tokens", "output_tokens")
    assert [[row[name] for name in ("tenant", *counts)] for row in ours["rows"]] == [
        [row[name] for name in ("tenant", *counts)] for row in theirs["rows"]
    ]
    assert ours["total"]["engine_seconds"] == pytest.approx(theirs["total"]["engine_seconds"], rel=0.02)
