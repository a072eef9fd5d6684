"""The doctor: silent about a healthy log, and each planted fault is found and named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestGranted,
    RequestHandedOver,
    RequestPlaced,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceDraining,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceSuspected,
)
from pointsman.contracts.reasons import CancelCause
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
from pointsman.primitives import BlockKey, Epoch, InstanceId, PoolName, RequestId, Sequence, Term
from pointsman.state.state import PoolSettings, State
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.doctor import examination
from pointsman_cli.doctor.balance import Balance
from pointsman_cli.doctor.caches import Caches
from pointsman_cli.doctor.engine_failures import EngineFailures, MissingTransfers
from pointsman_cli.doctor.examination import Diagnosis, Examiner, examine
from pointsman_cli.doctor.findings import Severity
from pointsman_cli.doctor.fleet_health import FleetHealth
from pointsman_cli.doctor.lateness import Lateness
from pointsman_cli.doctor.log_health import LogHealth
from pointsman_cli.doctor.requests import Requests
from pointsman_cli.doctor.samples import Heavy, Sample, Timeline
from pointsman_cli.doctor.service import Service
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.start_point import StartPoint
from pointsman_cli.main import main
from pointsman_cli.options import as_given
from pointsman_cli.terminal import wall_span, wall_time
from tests.support.commands import told_by, written
from tests.support.events import (
    arrived,
    finished,
    fleet_described,
    given_up,
    given_up_before_each_end,
    joined,
    no_instance,
    placed,
    reported,
    stored,
    told_again_before_each_end,
    with_several_answers,
)
from tests.support.failing_pool import FailingPool
from tests.support.failing_pool import policies as failing_policies
from tests.support.headless import write_headless
from tests.support.hung_ingress import with_hung_ingress
from tests.support.ingress_clock import WRONG_CLOCKS, with_ingress_clock
from tests.support.recorded_log import renumbered, rewritten, unnumbered
from tests.support.served_log import ServedLog

Entries = list[LogEntry]


@pytest.fixture(scope="module")
def healthy() -> Entries:
    return ServedLog().entries


def diagnosed(entries: Entries, directory: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings."""
    result = CliRunner().invoke(main, ["doctor", "--from", str(written(entries, directory)), "--json"])
    return result.exit_code, json.loads(result.stdout)["findings"]


def test_a_healthy_log_gives_nothing_to_complain_about(healthy: Entries, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--from", str(written(healthy, tmp_path))])

    assert result.exit_code == 0
    assert "nothing to complain about" in result.output
    assert "200 requests, 100.0% with the first token in time, after 0." in result.output
    assert "warning" not in result.output


@pytest.mark.parametrize("ahead", WRONG_CLOCKS)
def test_of_an_ingress_with_a_wrong_clock_nothing_is_said_but_that(ahead: float, tmp_path: Path) -> None:
    slowed = ServedLog(pace={"engine-2": 6.0}, gap=0.25, policies=policy_set(routing="round_robin")).entries
    _, right = diagnosed(with_ingress_clock(slowed, 0.0), tmp_path)
    _, wrong = diagnosed(with_ingress_clock(slowed, ahead), tmp_path)

    assert {"engines", "balance"} <= {finding["area"] for finding in right}
    assert [f for f in wrong if f["area"] != "clocks"] == right


@pytest.mark.parametrize("odd", ["a client's objective", "a worker's clock"])
def test_one_client_or_clock_tells_nothing_of_the_balance(odd: str) -> None:
    slow: dict[str, Any] = {"pace": {"engine-2": 6.0}, "gap": 0.25, "policies": policy_set(routing="round_robin")}
    skew = {"engine-1": 3600.0} if odd == "a worker's clock" else {}
    plain, told = ([e.event for e in ServedLog(**slow, skew=by).entries if e.event] for by in ({}, skew))
    if odd == "a client's objective":
        told = [
            replace(e, slo_ttft=600.0) if isinstance(e, RequestArrived) and e.request[-1] == "9" else e for e in told
        ]

    (right,), (found,) = (examined(events, Balance).findings for events in (plain, told))

    assert found.what == right.what


def test_a_healthy_log_that_has_lost_its_beginning_is_healthy_from_its_checkpoint_on(tmp_path: Path) -> None:
    served = ServedLog(families=1)
    file = write_headless(
        tmp_path / "log.pmlog", served.entries, 400, settings=served.state.settings, checkpoint=(500, served.policies)
    )
    told = told_by("doctor", "--from", str(file))

    assert told["beginning"].startswith("the log begins at entry 401; this begins behind entry 500, with a checkpoint")
    assert told["entries"] == len(served.entries) - 500
    assert [finding["what"] for finding in told["findings"]] == [
        "1 hot prefix draws more than an instance's even share"
    ]


def test_without_a_checkpoint_it_is_said_what_cannot_be_known_and_nobody_is_accused(
    healthy: Entries, tmp_path: Path
) -> None:
    file = write_headless(tmp_path / "log.pmlog", healthy, 400, settings=ServedLog(requests=1).state.settings)
    told = told_by("doctor", "--from", str(file))

    assert "no checkpoint that this version can begin with" in told["beginning"]
    assert [(finding["severity"], finding["what"]) for finding in told["findings"]] == [
        ("note", "what was known before entry 401 is missing: findings are of what began behind it")
    ]
    assert [said.partition(":")[0] for said in told["findings"][0]["evidence"]] == [
        f"engine-{number} joined before" for number in (1, 2, 3)
    ]


def test_commands_that_findings_advise_read_the_log_that_was_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = _with_garbage(_slow_and_forgetful())
    written(log, tmp_path, "a log")
    told = CliRunner().invoke(main, ["doctor", "--from", "a log", "--pool", "default"]).output
    advised = re.findall(r"`pointsman (explain|what-if|tap)( --from 'a log' --pool default)?", told)

    assert {name for name, _ in advised} == {"explain", "what-if", "tap"}
    assert re.search(r"what-if [^`]* --since [\dT:-]+ --until [\dT:-]+` tries another policy", told), (
        "the worst minutes"
    )
    assert all(bool(given) == (name != "tap") for name, given in advised), "a log that is over has no fleet to tap"


@pytest.mark.parametrize("place", ["nats://other:4222", "."])
def test_advised_commands_of_a_running_fleet_name_it(place: str) -> None:
    command = click.Command("doctor", params=[click.Option(["--from", "place"]), click.Option(["--pool"])])
    with command.make_context("doctor", ["--from", place, "--pool", "chat"]):
        assert fleet_as_given() == as_given() == f" --from {place} --pool chat"


def test_no_finding_advises_a_command_without_the_options_that_were_given() -> None:
    commands = r"`pointsman (?:explain|what-if|tap|tenants show|drain|fleet)\b(?!\{)"
    for source in Path(examination.__file__).parent.glob("*.py"):
        assert not re.findall(commands, source.read_text()), source.name


def _with_garbage(entries: Entries) -> Entries:
    return renumbered([*entries, LogEntry(0, entries[-1].subject, b"?", None)])


def _with_hole(entries: Entries) -> Entries:
    return entries[:100] + entries[103:]


def _with_lost_writes(entries: Entries) -> Entries:
    lost = WritesLost(at=50.0, writer="worker engine-1", count=3, reason="no answer")
    entry = unnumbered(lost)
    return renumbered([*entries[:200], entry, *entries[200:]])


def _without_ends(entries: Entries) -> Entries:
    late = [e for e in entries if isinstance(e.event, RequestFinished) and e.event.request in ("r-3", "r-4")]
    last = entries[-1].event
    assert last is not None
    reports = [reported("engine-1", 0, [], at=last.at + 100.0 * number) for number in range(1, 8)]
    later = list(map(unnumbered, reports))
    return renumbered([*(e for e in entries if e not in late), *later])


def _with_second_end(entries: Entries) -> Entries:
    event = next(e.event for e in entries if isinstance(e.event, RequestFinished))
    failed = RequestFailed(at=event.at + 1, request=event.request, reason="engine_failed", status=502)
    entry = unnumbered(failed)
    return renumbered([*entries, entry])


def _given_up(entries: Entries, *, also_ended: bool) -> Entries:
    """A leader gives up a request whose ingress, so it seems, is gone."""
    end = next(e for e in entries if isinstance(e.event, RequestFinished))
    event = end.event
    assert isinstance(event, RequestFinished)
    cancelled = given_up(event.request, at=event.at - 0.01, instance=event.instance)
    entry = unnumbered(cancelled)
    place = entries.index(end)
    return renumbered([*entries[:place], entry, *entries[place if also_ended else place + 1 :]])


def test_requests_of_an_ingress_that_is_gone_are_told_with_its_name(healthy: Entries, tmp_path: Path) -> None:
    _, findings = diagnosed(_given_up(healthy, also_ended=False), tmp_path)

    told = next(f for f in findings if "given up" in f["what"])
    assert (told["severity"], told["area"]) == ("warning", "requests")
    assert CancelCause.INGRESS_SILENT.sentence in told["what"]
    assert "ingress" in told["evidence"][0]


@pytest.mark.parametrize(
    ("cause", "severity", "advice"),
    [
        (CancelCause.INGRESS_STOPPED, Severity.WARNING, "--drain-seconds-max"),
        (CancelCause.TIMEOUT, Severity.WARNING, "--request-timeout-seconds"),
        (CancelCause.CLIENT_GONE, Severity.NOTE, ""),
    ],
)
def test_answers_that_were_cut_off_are_no_mere_note_unless_their_client_left(
    cause: CancelCause, severity: Severity, advice: str
) -> None:
    """By a stop of the ingress, clients have got an error in the middle of their answers."""
    cut = [
        RequestCancelled(at=6.0, request=RequestId(f"r-{n}"), reason=cause, cause=cause, instance=ENGINE)
        for n in range(2)
    ]
    log: list[LogEvent] = [joined("engine-1"), asked(0, 10), asked(1, 10), *cut]
    (told,) = examined(log, Requests).findings

    assert told.severity is severity
    assert told.what.startswith("2 requests were cut off: " if advice else "2 requests were cancelled")
    assert advice in told.advice
    assert told.evidence[:1] == (["2 of i"] if advice else ["2 client_gone"])
    (summary,) = examined(log, Service).summary
    assert summary.startswith("2 requests, 0.0% with the first token in time" if advice else "no request was answered")


def test_an_ingress_that_only_stood_still_makes_no_second_end(healthy: Entries, tmp_path: Path) -> None:
    _, findings = diagnosed(_given_up(healthy, also_ended=True), tmp_path)

    assert not any("ended twice" in f["what"] for f in findings)
    assert any("had only hung" in e for f in findings for e in f["evidence"])


def test_a_request_that_an_ingress_placed_before_its_leader_refused_it_ended_once() -> None:
    """The leader reads the command late: it was frozen, or cut off from NATS."""
    alone = RequestGranted(at=4.0, request=RequestId("r-1"), instance=ENGINE, attempt=1)
    log: list[LogEvent] = [joined("engine-1"), asked(1, 10), no_instance("r-1", at=9.0), alone, answered(1)]
    once, twice = ([f.what for f in examined(events, Requests).findings] for events in (log, [*log, answered(1)]))

    assert not any("ended twice" in what for what in once)
    assert "1 requests ended twice" in twice


@pytest.mark.parametrize(("placed_at", "is_alone"), [("engine-1", False), ("engine-2", True), ("", True)])
def test_what_an_ingress_tells_a_new_leader_of_requests_at_engines_was_not_placed_alone(
    placed_at: str, *, is_alone: bool
) -> None:
    by_ingress = RequestGranted(at=4.0, request=RequestId("r-1"), instance=ENGINE, attempt=1)
    known: list[LogEvent] = [asked(1, 10), placed("r-1", placed_at, at=1.0)] if placed_at else []
    log = [joined("engine-1"), joined("engine-2"), *known, by_ingress]
    console = Observer(State(PoolSettings()))
    for number, event in enumerate(log, 1):
        console.apply(LogEntry(number, "pm.default.any", b"", event))

    told = [f for f in examined(log, Requests).findings if "placed by ingresses alone" in f.what]
    assert [f.evidence for f in told] == [[wall_span(4.0, 4.0, SETTINGS.speed)]] * is_alone
    assert bool(console.minute.placed_alone) == is_alone


def _slow_and_forgetful() -> Entries:
    """Findings of every examiner that looks at what engines answered."""
    emptied = {"engine-1": 10.0, "engine-2": 30.0, "engine-3": 20.0}
    pace = {"engine-1": 3.0, "engine-2": 3.0}
    return ServedLog(pace=pace, emptied=emptied, gap=0.2, policies=policy_set(routing="round_robin")).entries


def _failing() -> Entries:
    pool = FailingPool()
    pool.serve(40, sick=InstanceId("a"), slow=10)
    for _ in range(3):
        pool.fails_everywhere()
    return pool.log


@pytest.mark.parametrize(
    ("entries", "areas"),
    [
        (_slow_and_forgetful, {"requests", "service", "engines", "caches", "predictions"}),
        (_failing, {"requests", "service", "engines"}),
    ],
)
def test_a_request_that_its_leader_gave_up_is_judged_by_the_end_that_its_ingress_wrote(
    tmp_path: Path, entries: Callable[[], Entries], areas: set[str]
) -> None:
    log = entries()
    ends = sum(isinstance(entry.event, RequestFinished | RequestFailed) for entry in log)
    plain, told = (diagnosed(some, tmp_path)[1] for some in (log, given_up_before_each_end(log)))
    (lost,) = [finding for finding in told if "given up" in finding["what"]]

    assert {finding["area"] for finding in plain} >= areas
    assert [finding for finding in told if finding is not lost] == plain
    assert lost["evidence"][1].startswith(f"{ends} of them ended after all")


def test_cached_tokens_of_several_answers_or_prompts_say_nothing_of_a_cache(tmp_path: Path) -> None:
    log = _slow_and_forgetful()
    plain, several = (diagnosed(some, tmp_path)[1] for some in (log, with_several_answers(log)))
    of_caches = re.compile("behind its back|cache hits are predicted wrongly")

    assert len([finding for finding in plain if of_caches.search(finding["what"])]) == 4
    assert not [finding for finding in several if of_caches.search(finding["what"])]
    assert not [line for finding in several for line in finding["evidence"] if "cached" in line]


def test_an_ingress_ends_what_its_leader_gave_up_once() -> None:
    log: list[LogEvent] = [
        joined("engine-1"),
        asked(1, 10),
        given_up("r-1", at=19.0, instance="engine-1"),
        answered(1),
        answered(1),
    ]
    told = [finding.what for finding in examined(log, Requests).findings]

    assert told[0] == "1 requests ended twice"
    assert told[1].startswith("1 request was given up")


def test_a_leader_that_gives_up_what_has_just_ended_makes_no_second_end() -> None:
    log: list[LogEvent] = [joined("engine-1"), asked(1, 10), answered(1), given_up("r-1", at=20.5, instance="engine-1")]

    assert not examined(log, Requests).findings


def _without_cache_events(entries: Entries) -> Entries:
    """One that was never written, of an engine whose worker then answers nobody."""
    lost = next(e for e in entries if isinstance(e.event, CacheEvent) and e.sequence > 100)
    return renumbered([e for e in entries if e is not lost])


def _with_failed_probe(entries: Entries) -> Entries:
    probe = InstanceProbed(at=3.0, instance=InstanceId("engine-1"), epoch=Epoch(1), parity=False, detail="tokens")
    entry = unnumbered(probe)
    return renumbered([*entries[:20], entry, *entries[20:]])


def _with_another_model(entries: Entries) -> Entries:
    """An instance that joins with it, reports, and leaves again."""
    told: list[LogEvent] = [joined("liar", at=3.0, model="other"), reported("liar", 0, [], at=4.0)]
    told += [InstanceLeft(at=5.0, instance=InstanceId("liar"), epoch=Epoch(1), reason="stopped")]
    added = list(map(unnumbered, told))
    return renumbered([*entries[:40], *added, *entries[40:]])


@pytest.mark.parametrize(
    ("plant", "area", "words"),
    [
        (_with_hole, "log", "3 entries are missing"),
        (_with_lost_writes, "log", "3 writes were lost"),
        (_without_ends, "requests", "2 requests have no end"),
        (_with_second_end, "requests", "ended twice"),
        (_without_cache_events, "caches", "in doubt, and nothing has healed it"),
        (_with_failed_probe, "caches", "keys of prompts are not those"),
        (_with_another_model, "fleet", "liar took no requests: another model than the pool's"),
    ],
)
def test_a_planted_fault_is_serious_and_named(
    healthy: Entries, tmp_path: Path, plant: Callable[[Entries], Entries], area: str, words: str
) -> None:
    code, findings = diagnosed(plant(healthy), tmp_path)

    named = [f for f in findings if f["area"] == area and words in f["what"]]
    assert [f["severity"] for f in named] == ["serious"], findings
    assert code == 1


def test_what_was_before_since_is_known_and_not_examined(healthy: Entries, tmp_path: Path) -> None:
    entries = [*_with_second_end(healthy), *healthy[-1:]]
    file = written(renumbered(entries), tmp_path)
    arguments = ["doctor", "--from", str(file), "--json", "--since"]
    results = [CliRunner().invoke(main, [*arguments, str(since)]) for since in (1, len(entries) - 1, len(entries))]
    told = [json.loads(result.stdout) for result in results]

    assert [result.exit_code for result in results] == [1, 1, 0]
    assert [any("ended twice" in f["what"] for f in of["findings"]) for of in told] == [True, True, False]
    assert [of["entries"] for of in told] == [len(entries), 2, 1]
    assert told[2]["beginning"] == f"from entry {len(entries):,} on"


ENGINE = InstanceId("engine-1")


def _followed_by(entries: Entries, *events: LogEvent) -> Entries:
    """With more events at its end, a second apart."""
    last = entries[-1].event
    assert last is not None
    said = [replace(event, at=last.at + number) for number, event in enumerate(events, start=1)]
    return renumbered([*entries, *map(unnumbered, said)])


def _lost() -> list[LogEvent]:
    """Engine-1 begins a life of which not all is known."""
    second: dict[str, Any] = {"at": 0.0, "instance": ENGINE, "epoch": Epoch(2)}
    return [
        joined(ENGINE, epoch=2, cache="unknown", cache_detail="not replayed"),
        CacheGap(sequence=1, missed=3, reason="not replayed", **second),
        CacheSnapshot(sequence=2, runs=[], **second),
        reported(ENGINE, 2, [], epoch=2),
        InstanceProbed(parity=True, **second),
    ]


def _of_caches(entries: Entries, tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {f["what"]: f for f in diagnosed(entries, tmp_path)[1] if f["area"] == "caches"}


def test_what_an_engine_lost_and_what_has_not_healed_of_it_is_told(healthy: Entries, tmp_path: Path) -> None:
    told = _of_caches(_followed_by(healthy, *_lost()), tmp_path)

    finding = told["the caches of engine-1 are not known exactly"]
    assert finding["severity"] == "warning"
    assert finding["evidence"] == [
        "engine-1: degraded for 4.0 s: not replayed; 1 gap, 3 missed: not replayed: not healed yet"
    ]
    assert not any("lost for good" in what for what in told)


def test_what_was_lost_long_ago_is_confirmed_or_given_up_by_now(healthy: Entries, tmp_path: Path) -> None:
    later = [reported(ENGINE, 2, [], epoch=2)] * 60
    told = _of_caches(_followed_by(healthy, *_lost(), *later), tmp_path)

    (said,) = told["the caches of engine-1 are not known exactly"]["evidence"]
    assert said.endswith("what was believed before is confirmed or given up, the engine may hold more")


def test_what_was_lost_is_told_as_healed_only_once_the_cache_is_known_again(healthy: Entries, tmp_path: Path) -> None:
    cleared = CacheCleared(at=0.0, instance=ENGINE, epoch=Epoch(2), sequence=3)
    told = _of_caches(_followed_by(healthy, *_lost(), cleared), tmp_path)

    (said,) = told["engine events were lost for good once, and that has healed"]["evidence"]
    assert said == ("engine-1: 1 gap, 3 missed: not replayed; known again after 4.0 s: the engine cleared its cache")
    assert not any("not known exactly" in what for what in told)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ([], "once, 1 of them to the end"),
        ([reported("engine-1", 1, [1, 2], at=3.0)], "once, and healed"),
        (
            [InstanceLeft(at=3.0, instance=InstanceId("engine-1"), epoch=Epoch(1), reason="stopped")],
            "once, 1 of them until the instance left",
        ),
    ],
)
def test_doubts_of_a_cache_have_healed_only_if_the_index_was_found_right(then: list[LogEvent], told: str) -> None:
    wrong = reported("engine-1", 1, [1, 2, 3], at=2.0)
    log: list[LogEvent] = [joined("engine-1"), stored("engine-1", 1, [1, 2], at=1.0), wrong, *then]
    found = [finding.what for finding in examined(log, Caches).findings]

    assert [what for what in found if "out of step" in what] == [f"what the log says of caches was out of step {told}"]


def test_an_engine_without_a_replay_socket_is_named(healthy: Entries, tmp_path: Path) -> None:
    second: list[LogEvent] = [
        joined(ENGINE, epoch=2, certain=False),
        InstanceProbed(at=0.0, instance=ENGINE, epoch=Epoch(2), parity=True),
    ]
    told = _of_caches(_followed_by(healthy, *second), tmp_path)

    finding = told["the caches of engine-1 are not known exactly"]
    assert finding["severity"] == "note"
    assert "no replay socket answers" in finding["evidence"][0]


def test_a_late_verdict_on_a_life_that_is_over_accuses_nobody(healthy: Entries, tmp_path: Path) -> None:
    began = joined(ENGINE, epoch=2)
    late = InstanceProbed(at=0.0, instance=ENGINE, epoch=Epoch(1), parity=False, detail="late")
    told = _of_caches(_followed_by(healthy, began, late), tmp_path)

    assert not any("keys of prompts" in what for what in told)


def test_a_clock_that_is_ahead_is_found_and_measured(tmp_path: Path) -> None:
    _, findings = diagnosed(ServedLog(skew={"engine-2": 2.5}).entries, tmp_path)

    skewed = next(f for f in findings if f["area"] == "clocks" and "clocks differ" in f["what"])
    assert skewed["severity"] == "serious"
    assert len(skewed["evidence"]) == 1
    assert re.fullmatch(r"worker engine-2 is 2\.[3-7] s ahead", skewed["evidence"][0])


@pytest.mark.parametrize("of", ["an ingress, ahead", "an ingress, behind", "a worker"])
def test_a_wrong_clock_makes_no_events_late_neither_its_own_nor_others(
    of: str, healthy: Entries, tmp_path: Path
) -> None:
    ahead = -40.0 if of.endswith("behind") else 40.0
    wrong = ServedLog(skew={"engine-2": ahead}).entries if of == "a worker" else with_ingress_clock(healthy, ahead)
    _, findings = diagnosed(wrong, tmp_path)

    told = [finding["what"] for finding in findings if finding["area"] == "clocks"]
    assert len(told) == 1
    assert "clocks differ" in told[0]


@pytest.mark.parametrize("place", [0, 300])
def test_an_event_with_a_wrong_clock_makes_no_request_overdue_and_no_other_event_late(
    healthy: Entries, tmp_path: Path, place: int
) -> None:
    end = next(e for e in reversed(healthy) if isinstance(e.event, RequestFinished))
    in_flight = [entry for entry in healthy if entry is not end]
    wrong = reported("engine-1", 0, [], at=1e12)
    planted = unnumbered(wrong)
    _, findings = diagnosed(renumbered([*in_flight[:place], planted, *in_flight[place:]]), tmp_path)

    told = [finding["what"] for finding in findings]
    assert not [what for what in told if "have no end" in what or "after later ones" in what], told


def test_a_slow_engine_is_found_although_nobody_was_late(tmp_path: Path) -> None:
    policies = policy_set(routing="round_robin")
    _, findings = diagnosed(ServedLog(pace={"engine-2": 3.0}, policies=policies).entries, tmp_path)

    assert any("engine-2 is slow" in f["what"] for f in findings if f["area"] == "engines")


def test_a_slow_spell_names_who_waited_longest_and_the_predictions_are_not_blamed_for_it(tmp_path: Path) -> None:
    served = ServedLog(pace={"engine-2": 12.0}, gap=0.25, policies=policy_set(routing="round_robin"))
    _, findings = diagnosed(served.entries, tmp_path)
    said = [f for f in findings if f["area"] in ("engines", "predictions")]

    longest = max(
        (e.event for e in served.entries if isinstance(e.event, PrefillFinished) and e.event.instance == "engine-2"),
        key=lambda event: event.prefill,
    )
    spell = next(f for f in said if "slow for a while: engine-2" in f["what"])
    assert f"the longest {longest.prefill:.2f} s (request {longest.request})" in spell["evidence"][0]
    assert not any("predicted wrongly" in f["what"] for f in said)


def test_of_several_engines_that_were_slow_for_a_while_the_worst_is_quoted(tmp_path: Path) -> None:
    served = ServedLog(pace={"engine-1": 7.0, "engine-2": 14.0}, gap=0.25, policies=policy_set(routing="round_robin"))
    _, findings = diagnosed(served.entries, tmp_path)

    spell = next(f["what"] for f in findings if "slow for a while" in f["what"])
    assert re.search(r"engine-1, engine-2; engine-2: \d+ prefills took", spell)


def test_a_short_while_of_lateness_in_a_log_that_is_mostly_in_time_is_found_and_dated(tmp_path: Path) -> None:
    entries = ServedLog(requests=900, gap=0.1).entries
    late = {f"r-{number}" for number in range(300, 350)}
    for entry in entries:
        if isinstance(entry.event, RequestFinished) and entry.event.request in late:
            entries = rewritten(entries, entry.sequence, replace(entry.event, ttft=9.0))
    _, findings = diagnosed(entries, tmp_path)

    service = next(f for f in findings if f["area"] == "service" and "for a while" in f["what"])
    begun = wall_time(30.0, 1.0)
    assert service["severity"] == "warning"
    assert service["evidence"] == [
        f"{begun:%Y-%m-%d %H:%M:%S} to {wall_time(40.0, 1.0):%H:%M:%S}: 50.0% of 100 that arrived then"
    ]


def test_times_of_a_long_log_stay_bounded_and_right() -> None:
    timeline = Timeline(5.0)
    for second in range(100_000):
        timeline.count(float(second), hit=not 40_000 <= second < 42_000)

    (worst,) = timeline.below(0.9, least=30)
    assert worst.missed == 2_000
    assert worst.begun <= 40_000 < 42_000 <= worst.ended
    assert worst.ended - worst.begun < 2_500


def test_of_many_engines_no_prefix_is_hot_that_came_once() -> None:
    """More engines than prefixes that are counted: each count is too high by as much as one more engine's share."""
    events: list[LogEvent] = [joined(f"engine-{number}") for number in range(300)]
    events += [replace(asked(n, 640), keys=pack_keys(range(100 * n + 1, 100 * n + 11))) for n in range(900)]

    assert not [f for f in examined(events, Service).findings if "hot" in f.what]


def test_a_prefix_that_everybody_shares_is_hot(tmp_path: Path) -> None:
    _, findings = diagnosed(ServedLog(families=1).entries, tmp_path)

    assert any("hot prefix" in f["what"] for f in findings)


def test_fleet_events_of_an_instance_that_flaps_are_serious(healthy: Entries, tmp_path: Path) -> None:
    worker = [e.event for e in healthy if isinstance(e.event, FleetEvent) and e.event.instance == "engine-1"]
    down = [type(e)(**_fields(e) | {"serving": n % 2 == 0}) for n, e in enumerate(worker) if hasattr(e, "serving")]
    entries = list(map(unnumbered, down))
    code, findings = diagnosed(renumbered([*healthy[:20], *entries]), tmp_path)

    assert any("again and again" in f["what"] for f in findings)
    assert code == 1


def test_a_fleet_of_which_everybody_drains_is_serious_and_said_first(healthy: Entries, tmp_path: Path) -> None:
    last = max(entry.event.at for entry in healthy if entry.event is not None)
    names = {e.event.instance: e.event.epoch for e in healthy if isinstance(e.event, InstanceJoined)}
    drains = [InstanceDraining(at=last, instance=name, epoch=names[name], reason="test") for name in sorted(names)]
    code, findings = diagnosed(_followed_by(_with_lost_writes(healthy), *drains), tmp_path)

    assert code == 1
    assert (findings[0]["severity"], findings[0]["what"]) == (
        "serious",
        "at the end of the log no instance takes requests",
    )
    assert findings[0]["evidence"] == [f"{name} drains: pointsman drain {name} --undo" for name in sorted(names)]


@pytest.mark.parametrize(
    ("wanted", "policy", "by", "seconds", "told"),
    [
        (5, "slo_attainment", "", 90.0, True),
        (5, "manual", "alice", 90.0, True),
        (5, "manual", "", 90.0, False),
        (5, "slo_attainment", "", 30.0, False),
        (3, "slo_attainment", "", 90.0, False),
    ],
)
def test_a_fleet_with_fewer_engines_than_wanted_is_told_with_the_reason(
    healthy: Entries, tmp_path: Path, *, wanted: int, policy: str, by: str, seconds: float, told: bool
) -> None:
    last = max(entry.event.at for entry in healthy if entry.event is not None)
    decided = ScaleDecided(
        at=last, policy=policy, settings={}, current=3, wanted=wanted, reason="busy", number=1, by=by
    )
    events: list[LogEvent] = [decided]
    events += [reported(f"engine-{n}", 10_000, [], at=last + seconds) for n in (1, 2, 3)]
    entries = list(map(unnumbered, events))
    _, findings = diagnosed(renumbered([*healthy, *entries]), tmp_path)

    found = [finding for finding in findings if "than wanted" in finding["what"]]
    assert [finding["what"] for finding in found] == ["fewer engines ready than wanted for 90 s: 3 of 5"] * told
    if told:
        assert found[0]["evidence"] == [
            "2 not in the fleet: not started, ended, or without a worker that joined",
            "5 were decided because: busy",
        ]
        assert "pointsman scale" in found[0]["advice"]


@pytest.mark.parametrize(("seconds", "stalled"), [(0.0, False), (1.5, False), (42.0, True)])
def test_a_live_fleet_whose_log_takes_no_writes_is_serious_and_said_first(
    healthy: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float, stalled: bool
) -> None:
    monkeypatch.setattr(BundleHistory, "fleet", fleet_described(unconfirmed_writes=7, unconfirmed_seconds=seconds))
    code, findings = diagnosed(_with_lost_writes(healthy) if stalled else healthy, tmp_path)

    assert code == int(stalled)
    said = [n for n, finding in enumerate(findings) if "has taken no writes for 42 s: 7 writes" in finding["what"]]
    assert said == ([0] if stalled else [])


def test_a_live_fleet_whose_scheduler_does_not_answer_is_serious_and_said_first(
    healthy: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BundleHistory, "unanswered", "no answer within 5 s")
    code, findings = diagnosed(healthy, tmp_path)

    assert (code, findings[0]["what"], findings[0]["evidence"]) == (1, "no scheduler answers", ["no answer within 5 s"])


@pytest.mark.parametrize("overdue", ["", "the log has gone on by 512 entries without a new one"])
def test_a_live_fleet_that_takes_no_checkpoints_is_warned_of(
    healthy: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overdue: str
) -> None:
    monkeypatch.setattr(BundleHistory, "fleet", fleet_described(checkpoints_overdue=overdue))
    code, findings = diagnosed(healthy, tmp_path)

    assert code == 0
    told = [(f["severity"], f["evidence"]) for f in findings if "checkpoints" in f["what"]]
    assert told == ([("warning", [overdue])] if overdue else [])


@pytest.mark.parametrize(("wanted", "told"), [(1, True), (0, False)])
def test_a_live_fleet_without_an_instance_is_serious_unless_it_sleeps(
    healthy: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wanted: int, told: bool
) -> None:
    monkeypatch.setattr(BundleHistory, "fleet", fleet_described(instances=[]))
    last = max(entry.event.at for entry in healthy if entry.event is not None)
    decided = ScaleDecided(at=last, policy="manual", settings={}, current=1, wanted=wanted, reason="", number=1)
    entry = unnumbered(decided)
    code, findings = diagnosed(renumbered([*healthy, entry]), tmp_path)

    assert code == int(told)
    assert [finding["what"] for finding in findings].count("no instance is in the fleet") == int(told)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (
            stored("engine-1", 1, [1, 2], epoch=2),
            ["engine-1 started again or stood still, with its cache lost or in doubt"],
        ),
        (CacheSnapshot(at=0.0, instance=InstanceId("engine-1"), epoch=Epoch(2), sequence=1, runs=[]), []),
    ],
)
def test_an_engine_that_began_anew_is_told_from_one_that_the_log_had_forgotten(
    healthy: Entries, tmp_path: Path, first: CacheEvent, told: list[str]
) -> None:
    end = healthy[-1].event
    assert end is not None
    again: list[Any] = [type(e)(**_fields(e) | {"at": end.at + 1}) for e in (joined("engine-1", epoch=2), first)]
    entries = list(map(unnumbered, again))
    _, findings = diagnosed(renumbered([*healthy, *entries]), tmp_path)

    assert [finding["what"] for finding in findings if finding["area"] == "fleet"] == told


def test_a_name_that_two_engines_have_is_told(healthy: Entries, tmp_path: Path) -> None:
    log = _followed_by(healthy, joined("engine-1", epoch=2, url="http://second:1"))
    _, findings = diagnosed(log, tmp_path)

    finding = next(finding for finding in findings if "another URL" in finding["what"])
    assert finding["what"].startswith("engine-1 joined at another URL")
    assert finding["evidence"][0].endswith(", then http://second:1")


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def test_figures_of_a_long_stream_stay_bounded_and_right() -> None:
    sample: Sample[int] = Sample(100)
    heavy: Heavy[int] = Heavy(10)
    for number in range(10_000):
        sample.add(number)
        heavy.add(7 if number % 3 == 0 else number + 100)

    assert len(sample.values) <= 101
    assert abs(sorted(sample.values)[len(sample.values) // 2] - 5000) < 300
    assert heavy.counts.most_common(1)[0][0] == 7
    assert len(heavy.counts) == 10


def test_an_engine_that_fails_requests_is_named_with_the_evidence_whether_it_was_ejected_or_not(tmp_path: Path) -> None:
    for share, told in (
        (0.75, "engines and was ejected once; at the end of the log it is still out"),
        (0.0, "engines"),
    ):
        pool = FailingPool(policies=failing_policies(max_ejection_share=share))
        pool.serve(40, sick=InstanceId("a"))
        code, findings = diagnosed(pool.log, tmp_path)

        finding = next(f for f in findings if f["area"] == "engines")
        failed = 5 if share else 14
        assert code == 1
        assert finding["severity"] == "serious"
        assert finding["ongoing"] == bool(share)
        assert finding["what"].startswith(f"a failed {failed} requests, ")
        assert finding["what"].endswith(told)
        assert finding["evidence"][0].startswith(f"{failed} http_5xx 500; {failed} of {failed} requests sent there, ")
        assert ("consecutive_failures" in finding["evidence"][1]) == bool(share)


def test_an_engine_that_was_slow_is_named_and_a_request_that_failed_everywhere_is_told_apart(tmp_path: Path) -> None:
    pool = FailingPool()
    pool.serve(40, sick=InstanceId("a"), slow=10)
    request, first, second = pool.fails_everywhere()
    _, findings = diagnosed(pool.log, tmp_path)

    told = {f["what"]: " ".join(f["evidence"]) for f in findings if f["area"] == "engines"}
    slow = next(evidence for what, evidence in told.items() if what.startswith("a was ejected once"))
    assert "(1 latency); the last time because" in slow
    assert told["1 request failed at every engine that tried: their own fault, by all signs"] == (
        f"{request}: at {first}, {second}"
    )


def test_no_engine_is_slow_because_an_ingress_hung(tmp_path: Path) -> None:
    served = ServedLog(gap=0.1, requests=300, policies=policy_set(routing="round_robin"))
    plain, told = (diagnosed(log, tmp_path)[1] for log in (served.entries, with_hung_ingress(served.entries)))
    late = next(f for f in told if f["cause"])
    lost = next(f for f in told if "given up" in f["what"])

    assert not [f for f in told if f["area"] == "engines" and f not in plain]
    assert late["what"].endswith(
        "because time went by between the processes: ingress, scheduler or network were busy or hung"
    )
    assert [line for line in lost["evidence"] if "hung: it wrote nothing" in line] == [
        "ingress-2 hung: it wrote nothing from 1970-01-01 00:00:07 to 00:00:18",
        "ingress-2 hung: it wrote nothing from 1970-01-01 00:00:19 to 00:00:30",
    ]


def _timed_out(number: int, *, at: float = 12.0, **fields: Any) -> RequestAttemptFailed:
    return RequestAttemptFailed(
        at=at, request=RequestId(f"r-{number}"), instance=InstanceId(f"engine-{number}"),
        failure="connect_failure", detail="ConnectionTimeoutError", **fields,
    )  # fmt: skip


def _attempts_at_three_engines(*between: LogEvent) -> list[LogEvent]:
    """Each breaks off at 12 s."""
    numbers = (1, 2, 3)
    engines: list[LogEvent] = [joined(f"engine-{number}") for number in numbers]
    grants: list[LogEvent] = [
        RequestGranted(at=1.0, request=RequestId(f"r-{number}"), instance=InstanceId(f"engine-{number}"))
        for number in numbers
    ]
    return [*engines, *(asked(n, 10) for n in numbers), *grants, *between, *(_timed_out(n) for n in numbers)]


def test_a_prefill_engine_that_names_no_kv_cache_is_told() -> None:
    def log(**fields: Any) -> list[LogEvent]:
        granted = RequestGranted(at=1.0, request=RequestId("r-1"), instance=InstanceId("p1"), decode=InstanceId("d1"))
        handed = RequestHandedOver(at=2.0, request=RequestId("r-1"), source=InstanceId("p1"), instance=InstanceId("d1"))
        end = replace(finished("r-1", "d1", at=3.0), **fields)
        return [joined("p1", role="prefill"), joined("d1", role="decode"), asked(1, 10), granted, handed, end]

    (found,) = examined(log(without_transfer=True), MissingTransfers).findings

    assert found.what.startswith("p1 named no KV cache after the prefills of 1 request:")
    assert found.evidence == ["for example r-1"]
    assert not examined(log(), MissingTransfers).findings


def test_grants_that_ingresses_tell_a_new_leader_are_no_requests_that_were_sent(tmp_path: Path) -> None:
    pool = FailingPool(policies=failing_policies(max_ejection_share=0.0))
    pool.serve(40, sick=InstanceId("a"))
    plain, told = (
        next(finding for finding in diagnosed(log, tmp_path)[1] if finding["area"] == "engines")["what"]
        for log in (pool.log, told_again_before_each_end(pool.log))
    )

    assert told == plain


def test_of_failures_where_no_kv_cache_came_the_engines_that_prefilled_are_named() -> None:
    sources = ("p1", "p1", "p2", "")
    failures = [_timed_out(1, prefilled_by=InstanceId(source)) for source in sources]
    (found,) = examined([joined("engine-1"), asked(1, 10), *failures], EngineFailures).findings

    assert found.evidence[1] == (
        "of those it was to fetch KV caches: 2 of p1, 1 of p2; the engine that prefilled may be to blame instead"
    )


@pytest.mark.parametrize("down_at", [11.0, 13.0])
def test_an_engine_that_died_is_not_said_to_look_well(down_at: float) -> None:
    events: list[LogEvent] = [reported("engine-1", 0, [], at=down_at, serving=False), _timed_out(1)]
    told = sorted(events, key=lambda event: event.at)
    (found,) = examined([joined("engine-1"), asked(1, 10), *told], EngineFailures).findings

    assert "never ejected: it was down" in found.evidence[1]
    assert found.advice.startswith("engine-1 stopped answering its worker, too")


def _blamed(events: list[LogEvent]) -> list[str]:
    """The engines that are to be drained."""
    found = examined(events, EngineFailures).findings
    return sorted(f.what.partition(" ")[0] for f in found if "Drain it" in f.advice)


LOST = given_up("r-1", at=5.0, instance="engine-1")


def test_attempts_that_break_off_as_an_ingress_goes_on_after_a_hang_are_no_reason_to_drain_engines() -> None:
    (finding,) = examined(_attempts_at_three_engines(LOST), EngineFailures).findings

    assert finding.severity == "warning"
    assert finding.what == (
        "3 attempts at engine-1, engine-2, engine-3 broke off while i hung: no fault of the engines"
    )
    assert finding.evidence[-1] == "i hung: it wrote nothing from 1970-01-01 00:00:01 to 00:00:12"
    assert "Drain no engine" in finding.advice


def test_an_engine_that_fails_others_than_the_ingress_that_hung_is_named() -> None:
    every = ["engine-1", "engine-2", "engine-3"]
    of_other = replace(asked(4, 10), ingress="j")
    late: list[LogEvent] = [
        replace(asked(5, 10), arrived_at=4.0, at=13.0),
        RequestGranted(at=13.0, request=RequestId("r-5"), instance=InstanceId("engine-5")),
        _timed_out(5, at=14.0),
    ]
    wrote: list[LogEvent] = [_timed_out(1, at=second) for second in (2.0, 3.0, 4.0, 4.9)]

    assert _blamed(_attempts_at_three_engines()) == every, "nothing was given up"
    assert _blamed([*_attempts_at_three_engines(LOST, of_other), _timed_out(4)]) == ["engine-4"]
    assert _blamed([*_attempts_at_three_engines(LOST), *late]) == ["engine-5"], "granted after the hang"
    assert _blamed([*_attempts_at_three_engines(LOST), replace(_timed_out(2), status=500)]) == ["engine-2"]
    cut_off: list[LogEvent] = [LOST, *wrote, _timed_out(1, at=5.1)]
    assert _blamed(_attempts_at_three_engines(*cut_off)) == every, "it wrote meanwhile: only its connection was gone"


def test_an_engine_that_was_ejected_for_what_a_hung_ingress_saw_need_not_be_drained() -> None:
    log = _attempts_at_three_engines(LOST)
    for cause in ("consecutive_failures", "latency"):
        ejected = InstanceEjected(
            at=13.0, instance=InstanceId("engine-2"), epoch=Epoch(1), cause=cause, detail="", seconds=30.0, number=1
        )

        assert _blamed([*log, ejected]) == (["engine-2"] if cause == "latency" else [])


@pytest.mark.parametrize(
    ("leaders", "severity", "evidence"),
    [
        ([(6, 1), (6, 1)], None, []),
        ([(6, 0), (6, 1)], "note", ["term 2: fold version 6 to 6, wire version 0 to 1"]),
        ([(5, 0), (6, 1)], "note", ["term 2: fold version 5 to 6, wire version 0 to 1"]),
        ([(6, 1), (6, 0)], "warning", ["term 2: fold version 6 to 6, wire version 1 to 0"]),
    ],
)
def test_leaders_of_several_releases_are_named_with_their_versions(
    leaders: list[tuple[int, int]], severity: str | None, evidence: list[str], tmp_path: Path
) -> None:
    elections = [
        LeaderElected(at=float(n), term=Term(n), scheduler="s", as_of=n - 1, pool={"fold_version": fold}, wire=wire)
        for n, (fold, wire) in enumerate(leaders, start=1)
    ]
    entries = [LogEntry.read(n, "pm.default.leader", encode(event)) for n, event in enumerate(elections, start=1)]
    _, findings = diagnosed(entries, tmp_path)
    found = [f for f in findings if "of other releases" in f["what"]]

    assert [f["severity"] for f in found] == ([severity] if severity else [])
    assert [line for f in found for line in f["evidence"]] == evidence


POOL, ENGINE, SETTINGS = PoolName("default"), InstanceId("engine-1"), PoolSettings()


def test_a_refused_url_is_told_with_what_to_do_also_while_its_worker_goes_on_reporting() -> None:
    leader = Stamp(term=Term(0), number=1, as_of=Sequence(0))
    left = InstanceLeft(at=2.0, instance=ENGINE, epoch=Epoch(1), reason="its URL", stamp=leader, refused=True)
    findings = examined([joined("engine-1", at=1.0), left, reported("engine-1", 0, [], at=3.0)], FleetHealth).findings

    assert [finding.advice for finding in findings if "--engine-urls" in finding.advice]
    assert not [finding for finding in findings if "never joined" in finding.what]


@pytest.mark.parametrize(("changes", "severity"), [(1, Severity.NOTE), (6, Severity.NOTE), (7, Severity.WARNING)])
def test_a_leader_that_changes_is_worth_a_warning_from_the_seventh_time_within_an_hour(
    changes: int, severity: Severity
) -> None:
    """Each new leader decides at once, so that nothing but their number is wrong."""
    log: list[LogEvent] = [joined("engine-1")]
    for term in range(1, changes + 2):
        log.append(LeaderElected(at=float(term), term=Term(term), scheduler=f"s-{term}", as_of=Sequence(len(log))))
    (told,) = [finding for finding in examined(log, LogHealth).findings if "leader changed" in finding.what]

    assert told.severity is severity


def examined(events: list[LogEvent], examiner: type[Examiner]) -> Diagnosis:
    entries = [LogEntry.read(n, subject_of(POOL, event), encode(event)) for n, event in enumerate(events, 1)]
    return examine(entries, SETTINGS, [examiner(SETTINGS)], StartPoint(None, ""))


def restart(at: float, epoch: int) -> list[LogEvent]:
    """One restart as a log tells it: suspected, gone, there again, serving."""
    leader = Stamp(term=Term(0), number=0, as_of=Sequence(0))
    return [
        InstanceSuspected(at=at, instance=ENGINE, epoch=Epoch(epoch - 1), silent_seconds=3.0, stamp=leader),
        InstanceLeft(at=at + 5, instance=ENGINE, epoch=Epoch(epoch - 1), reason="silent", stamp=leader),
        joined("engine-1", at=at + 9, epoch=epoch),
        stored("engine-1", 1, [1], epoch=epoch, at=at + 10),
        reported("engine-1", 1, [1], epoch=epoch, at=at + 11),
    ]


@pytest.mark.parametrize(
    ("restarts", "end", "severity"),
    [
        ([100.0], 200.0, None),
        ([100.0, 700.0, 1300.0], 1400.0, None),
        ([100.0, 150.0], 200.0, None),
        ([100.0, 150.0, 200.0], 300.0, "serious"),
        ([100.0, 150.0, 200.0], 2000.0, "warning"),
    ],
)
def test_an_instance_flaps_by_absences_close_together_and_is_to_be_taken_out_only_while_it_does(
    restarts: list[float], end: float, severity: str | None
) -> None:
    events: list[LogEvent] = [joined("engine-1", at=50.0)]
    for epoch, at in enumerate(restarts, 2):
        events += restart(at, epoch)
    for reported_at in [*range(int(restarts[-1]) + 100, int(end), 100), end]:
        events.append(reported("engine-1", 1, [1], epoch=len(restarts) + 1, at=reported_at))
    told = [f for f in examined(events, FleetHealth).findings if "again and again" in f.what]

    assert [finding.severity for finding in told] == ([severity] if severity else [])
    assert all(("drain" in finding.advice) == (severity == "serious") for finding in told)


def asked(number: int, tokens: int) -> RequestArrived:
    return arrived(f"r-{number}", at=1.0, tenant="", prompt_tokens=tokens, max_output_tokens=1)


def _placed(number: int, *, at: float) -> RequestPlaced:
    return placed(f"r-{number}", ENGINE, at=at, prefill_seconds=0.01, predicted_ttft=0.01)


def answered(number: int, *, late: bool = False) -> RequestFinished:
    return finished(f"r-{number}", ENGINE, at=20.0, e2e=9.0, ttft=9.0 if late else 1.0)


def test_a_span_that_ends_on_another_day_says_which() -> None:
    begun, ended = wall_time(0.0, 1.0), wall_time(90_000.0, 1.0)

    assert wall_span(0.0, 90_000.0, 1.0) == f"{begun:%Y-%m-%d %H:%M:%S} to {ended:%Y-%m-%d %H:%M:%S}"
    assert wall_span(0.0, 60.0, 1.0) == f"{begun:%Y-%m-%d %H:%M:%S} to {wall_time(60.0, 1.0):%H:%M:%S}"


def test_only_prompt_lengths_that_are_served_worse_are_listed_and_one_length_is_one_line() -> None:
    events: list[LogEvent] = [joined("engine-1")]
    lengths = [197] * 600 + [1000 + n for n in range(200)] + [5000 + n for n in range(200)]
    for number, tokens in enumerate(lengths):
        events += [asked(number, tokens), answered(number, late=tokens >= 5000 or (tokens == 197 and number < 60))]
    (finding,) = [f for f in examined(events, Service).findings if "prompt lengths" in f.what]

    assert finding.evidence == ["5,000 to 5,199 tokens: 0.0% of 200 in time"]


def test_lateness_that_does_not_depend_on_the_length_blames_no_length() -> None:
    events: list[LogEvent] = [joined("engine-1")]
    for number in range(1000):
        events += [asked(number, 197), answered(number, late=number % 4 == 0)]

    assert not [f for f in examined(events, Service).findings if "prompt lengths" in f.what]


@pytest.mark.parametrize(
    ("held_up", "cause"),
    [
        (9.0, "no scheduler answered for a while"),
        (0.0, "time went by between the processes: ingress, scheduler or network were busy or hung"),
    ],
)
def test_a_wait_for_a_scheduler_makes_late_although_admission_excuses_it(held_up: float, cause: str) -> None:
    events: list[LogEvent] = [joined("engine-1")]
    for number in range(10):
        arrival = replace(asked(number, 10), at=10.0, held_up=held_up)
        events += [arrival, _placed(number, at=10.0), answered(number, late=True)]
    events += [asked(10, 10), replace(given_up("r-10", at=11.0), cause=CancelCause.CLIENT_GONE)]
    (late,) = examined(events, Lateness).findings
    (summary,) = examined(events, Service).summary

    assert late.what == f"10 of 10 requests were late because {cause}"
    assert summary.startswith("10 requests, 0.0% with the first token in time")


@pytest.mark.parametrize(
    ("streaming", "cause"),
    [(True, "their engine was slow"), (False, "they were not streamed, and the whole answer had to be written first")],
)
def test_late_answers_that_are_not_streamed_blame_no_engine(streaming: bool, cause: str) -> None:
    events: list[LogEvent] = [joined("engine-1")]
    for number in range(10):
        arrival = replace(asked(number, 10), streaming=streaming)
        events += [arrival, _placed(number, at=1.0), answered(number, late=True)]
    (late,) = examined(events, Lateness).findings

    assert late.what == f"10 of 10 requests were late because {cause}"


def test_a_request_that_comes_again_under_another_id_is_one_request() -> None:
    events: list[LogEvent] = [joined("engine-1")]
    for number in range(0, 60, 6):
        lost, unplaced, refused = (f"r-{number + other}" for other in (0, 2, 4))
        events += [asked(number, 10), given_up(lost, at=5.0, instance="engine-1", number=number + 1)]
        events += [replace(asked(number + 1, 10), instead_of=RequestId(lost)), answered(number + 1)]
        events += [asked(number + 2, 10), no_instance(unplaced, at=5.0, number=number + 2)]
        events += [replace(asked(number + 3, 10), instead_of=RequestId(unplaced)), answered(number + 3, late=True)]
        events += [asked(number + 4, 10), no_instance(refused, at=5.0, number=number + 3)]
    of_requests = [finding.what for finding in examined(events, Requests).findings]
    (lost_ones,) = [finding for finding in examined(events, Requests).findings if "given up" in finding.what]
    (late,) = examined(events, Lateness).findings
    (summary,) = examined(events, Service).summary

    assert "10 of 30 requests (33.3%) were rejected" in of_requests
    assert lost_ones.what.startswith("10 requests were given up")
    assert "10 of them ended after all: their ingress had only hung" in lost_ones.evidence
    assert not any("ended twice" in what or "cancelled" in what for what in of_requests)
    assert late.what.startswith("20 of 30 requests were late or rejected")
    assert summary.startswith("30 requests, 33.3% with the first token in time")


def test_a_prompt_that_comes_again_under_another_id_is_no_hotter() -> None:
    events: list[LogEvent] = [joined("engine-1"), joined("engine-2")]
    events += [reported("engine-1", 0, [], at=0.5), reported("engine-2", 0, [], at=0.5)]
    for number in range(40):
        alone = replace(asked(number, 70), keys=pack_keys([BlockKey(1 if number < 18 else 100 + number)]))
        events += [alone, given_up(f"r-{number}", at=5.0, number=number + 1)] if number < 18 else [alone]
    for number in range(18):
        again = replace(asked(100 + number, 70), keys=pack_keys([BlockKey(1)]), instead_of=RequestId(f"r-{number}"))
        events.append(again)

    assert not [finding for finding in examined(events, Service).findings if "hot" in finding.what]


def test_requests_without_an_arrival_are_counted_as_such() -> None:
    events: list[LogEvent] = [joined("engine-1"), asked(1, 10), answered(1), answered(1), answered(2)]
    (summary,) = examined(events, Service).summary
    alone = examined(events[-1:], Service).summary

    assert summary.startswith("1 request, 100.0% with the first token in time")
    assert "; 1 more are not judged, as their arrival is not in the log" in summary
    assert alone[0].startswith("1 more are not judged")


@pytest.mark.parametrize(
    ("status", "reason", "refused", "severity"),
    [
        (400, "engine_refused", 2, "note"),
        (501, "engine_refused", 2, "note"),
        (400, "engine_refused", 60, "warning"),
        (401, "engine_refused", 2, "serious"),
        (429, "engine_refused", 2, "serious"),
        (502, "engine_failed", 2, "serious"),
    ],
)
def test_what_an_engine_refused_for_what_the_client_asked_is_no_fault_of_the_fleet(
    status: int, reason: str, refused: int, severity: str
) -> None:
    events: list[LogEvent] = [joined("engine-1")]
    for number in range(100):
        end = RequestFailed(at=2.0, request=RequestId(f"r-{number}"), reason=reason, status=status, instance=ENGINE)
        events += [asked(number, 10), end if number < refused else answered(number)]
    (finding,) = examined(events, Requests).findings
    (summary,) = examined(events, Service).summary

    assert finding.severity == severity
    assert f"{refused} of 100 requests" in finding.what
    assert ("100.0% with" in summary) == (severity != "serious")
