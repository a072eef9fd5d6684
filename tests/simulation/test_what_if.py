"""A recorded log run again: the same policy gives the record back, a slow engine is slow again, less fleet is worse."""

import json
import re
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from pointsman.analysis.calibration import profile_of
from pointsman.analysis.comparison import fidelity
from pointsman.analysis.recorded_traffic import TrafficBounds, read_record
from pointsman.analysis.what_if import ReplayedFleet
from pointsman.contracts.cache import BlocksStored
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestMigrated, RequestPlaced
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import DecodeCost, InstanceJoined, PrefillCost
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Tenant
from pointsman.simulation import simulator
from pointsman.simulation.metrics import summarise
from pointsman.simulation.outcome import Outcome
from pointsman.simulation.simulator import FleetMirror, Scenario
from pointsman.simulation.step_cost import StepCost
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman.state.state import PoolSettings
from pointsman_cli.main import main
from tests.support.commands import told_by, written
from tests.support.events import BLOCK, given_up, joined, rejected, told_again_before_each_end
from tests.support.headless import write_headless
from tests.support.ingress_clock import WRONG_CLOCKS, with_ingress_clock
from tests.support.recorded_log import rewritten
from tests.support.served_log import ServedLog

WELL = 0.05
SETTINGS = PoolSettings(block_tokens=BLOCK)


POLICIES = policy_set(
    routing="round_robin", admission="none", hold_seconds=5.0, running_max=7, rebind=True, copies=True
)
"""With every optional setting of a leader."""


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    return ServedLog(requests=240, gap=0.4, pace={"engine-2": 3.0}, policies=POLICIES).entries


def test_a_grant_that_an_ingress_tells_a_new_leader_is_not_when_the_request_was_sent(entries: list[LogEntry]) -> None:
    plain, told = (
        read_record(log, origin="", settings=PoolSettings(block_tokens=BLOCK)).outcome.rows
        for log in (entries, told_again_before_each_end(entries))
    )

    assert [row.granted_at for row in told] == [row.granted_at for row in plain]


def what_if(entries: list[LogEntry], directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["what-if", "--from", str(written(entries, directory)), *arguments])


def outcome_of(run: Generator[float, None, Outcome]) -> Outcome:
    while True:
        try:
            next(run)
        except StopIteration as end:
            result: Outcome = end.value
            return result


def numbers(entries: list[LogEntry], directory: Path, *arguments: str) -> dict[str, Any]:
    result = what_if(entries, directory, *arguments, "--json")
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_the_same_policy_simulated_again_gives_the_record_back(entries: list[LogEntry], tmp_path: Path) -> None:
    told = numbers(entries, tmp_path, "--policy", "min_ttft")

    recorded, again = told["recorded"]["report"], told["resimulated"]["report"]
    assert told["reproduced"], told["fidelity"]
    assert again["hit_rate"] == pytest.approx(recorded["hit_rate"], abs=WELL)
    assert again["ttft"]["p50_s"] == pytest.approx(recorded["ttft"]["p50_s"], rel=0.2)
    assert told["recorded"]["by_instance"].keys() == told["resimulated"]["by_instance"].keys()


def test_a_slow_engine_is_slow_in_the_simulation_too(entries: list[LogEntry], tmp_path: Path) -> None:
    speeds = numbers(entries, tmp_path, "--policy", "min_ttft")["calibration"]["speeds"]

    assert speeds["engine-2"] == pytest.approx(1 / 3, rel=0.25)
    assert speeds["engine-1"] == pytest.approx(1.0, rel=0.25)


def test_a_policy_that_avoids_the_slow_engine_is_better_and_the_table_says_so(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    told = numbers(entries, tmp_path, "--policy", "min_ttft")
    shown = what_if(entries, tmp_path, "--policy", "min_ttft")

    assert told["changed"]["report"]["ttft"]["p90_s"] < told["resimulated"]["report"]["ttft"]["p90_s"]
    for part in ("recorded", "re-simulated", "min_ttft", "effective capacity", "TTFT P90", "hit rate", "load CV"):
        assert part in shown.output
    assert "[/]" not in shown.output


def test_another_number_of_instances_serves_it_all(entries: list[LogEntry], tmp_path: Path) -> None:
    fewer, more = (numbers(entries, tmp_path, "--instances", count)["changed"] for count in ("1", "5"))

    assert list(fewer["by_instance"]) == ["engine-1"]
    assert list(more["by_instance"]) == ["engine-1", "engine-2", "engine-3", "extra-1", "extra-2"]
    assert fewer["report"]["hit_rate"] > more["report"]["hit_rate"]


def test_requests_before_since_warm_the_caches_and_are_not_counted(entries: list[LogEntry], tmp_path: Path) -> None:
    told = numbers(entries, tmp_path, "--order", "edf", "--since", "@60")

    assert told["warmup"] + told["requests"] == 240
    assert told["warmup"] == pytest.approx(59 / 0.4, abs=2)


def test_a_log_that_has_lost_its_beginning_is_counted_from_its_checkpoint_on(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    file = write_headless(tmp_path / "gone.pmlog", entries, 400, settings=SETTINGS, checkpoint=(600, POLICIES))
    told = told_by("what-if", "--from", str(file), "--policy", "min_ttft")
    whole = numbers(entries, tmp_path, "--policy", "min_ttft", "--since", "600")

    assert told["requests"] == whole["requests"] > 100
    assert 0 < told["warmup"] < whole["warmup"]
    assert told["recorded"]["report"]["ttft"] == pytest.approx(whole["recorded"]["report"]["ttft"])
    assert told["calibration"]["speeds"].keys() == whole["calibration"]["speeds"].keys()
    assert any("counted from entry 601 on" in note for note in told["notes"])


def test_without_a_checkpoint_what_engines_there_were_is_not_guessed(entries: list[LogEntry], tmp_path: Path) -> None:
    file = write_headless(tmp_path / "gone.pmlog", entries, 400, settings=SETTINGS)
    result = CliRunner().invoke(main, ["what-if", "--from", str(file), "--policy", "min_ttft"])

    assert result.exit_code == 2
    assert "engine-1, engine-2, engine-3 took requests and joined before the log begins" in result.output


def test_too_little_traffic_no_change_and_unknown_settings_are_refused(entries: list[LogEntry], tmp_path: Path) -> None:
    few = what_if(entries, tmp_path, "--policy", "min_ttft", "--since", "@90")
    nothing = what_if(entries, tmp_path)
    unknown = what_if(entries, tmp_path, "--policy", "dualmap", "--set", "routing.no_such=1")

    assert (few.exit_code, "too few" in few.output) == (2, True)
    assert (nothing.exit_code, "what is to be different" in nothing.output) == (2, True)
    assert (unknown.exit_code, "no setting" in unknown.output) == (2, True)


def test_engines_that_fetch_prefixes_do_so_in_the_simulation(entries: list[LogEntry]) -> None:
    """Round robin sends the turns of a conversation to another engine each."""

    def simulated(**fields: Any) -> Outcome:
        told = [
            msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, **fields))
            if isinstance(entry.event, InstanceJoined)
            else entry
            for entry in entries
        ]
        fleet = ReplayedFleet(read_record(told, origin="a log", settings=SETTINGS))
        return outcome_of(fleet.run(fleet.scenario))

    without, fetching = simulated(), simulated(fetches=True, transfer_tokens_per_s=100_000.0)

    assert without.fetches == 0
    assert fetching.fetches > 20
    assert mean(row.cached_tokens for row in fetching.rows) > mean(row.cached_tokens for row in without.rows)


def test_the_simulated_pool_has_the_limits_of_the_recorded_one(entries: list[LogEntry]) -> None:
    settings = replace(SETTINGS, affinity_level_tokens=2 * BLOCK, hot_share=2.0)
    scenario = ReplayedFleet(read_record(entries, origin="a log", settings=settings)).scenario

    assert (scenario.running_max, scenario.affinity_level_tokens, scenario.hot_share) == (7, 2 * BLOCK, 2.0)
    slow = replace(scenario, running_max=1)
    outcome = outcome_of(ReplayedFleet(read_record(entries, origin="a log", settings=settings)).run(slow))
    assert max(running for sample in outcome.samples for running in sample.running) <= 1


def test_simulated_clients_ask_for_as_many_tokens_as_the_recorded_ones(entries: list[LogEntry]) -> None:
    """A third asks for 900, a third for any number, a third for none, as for an embedding; who gets any gets a few."""
    bounds, answered = (900, 2**31, 0), (20, 20, 0)

    def as_told(entry: LogEntry) -> LogEntry:
        match entry.event:
            case RequestArrived(request=request) as arrival:
                event: LogEvent = msgspec.structs.replace(arrival, max_output_tokens=bounds[kind_of(request)])
            case RequestFinished(request=request) as finish:
                event = msgspec.structs.replace(finish, completion_tokens=answered[kind_of(request)])
            case _:
                return entry
        return msgspec.structs.replace(entry, event=event)

    def kind_of(request: str) -> int:
        return int(request.removeprefix("r-")) % 3

    requests = read_record(map(as_told, entries), origin="a log", settings=SETTINGS).requests

    asked = Counter((request.max_output_tokens, request.output_tokens) for request in requests)
    assert asked.keys() == {(900, 20), (2**31, 20), (1, 1)}, "an engine generates one token at least"
    assert min(asked.values()) > 50


@pytest.mark.parametrize("ahead", WRONG_CLOCKS)
def test_an_ingress_with_a_wrong_clock_changes_no_record(ahead: float, entries: list[LogEntry]) -> None:
    right, wrong = (
        read_record(with_ingress_clock(entries, clock), origin="a log", settings=SETTINGS) for clock in (0.0, ahead)
    )

    for told, same in ((right.requests, wrong.requests), (right.outcome.rows, wrong.outcome.rows)):
        assert [approximate(one) for one in told] == [approximate(one) for one in same]
    assert len(wrong.outcome.samples) == len(right.outcome.samples) > 50


def approximate(value: Any) -> Any:
    """Seconds to the millisecond."""
    return [round(field, 3) if isinstance(field, float) else field for field in astuple(value)]


def test_tpot_objectives_are_those_of_the_record(entries: list[LogEntry]) -> None:
    """Tokens come every 20 ms."""

    def in_pace(slo: float) -> tuple[float | None, float | None]:
        told = _changed(entries[: len(entries) // 2], RequestArrived, lambda _: {"slo_tpot": slo})
        told = _changed(told, RequestFinished, lambda _: {"tbt_p90": 0.02})
        record = read_record(told, origin="a log", settings=SETTINGS)
        fleet = ReplayedFleet(record)
        again = outcome_of(fleet.run(fleet.scenario))
        assert {row.slo_tpot for row in (*record.outcome.rows, *again.rows)} == {slo}
        return tuple(summarise(one).effective_capacity_with_tbt for one in (record.outcome, again))  # type: ignore[return-value]

    assert in_pace(0.01) == (0.0, 0.0)
    assert all((share or 0.0) > 0.5 for share in in_pace(0.2))


COSTS = {
    "fixed, and no floor": PrefillCost(fixed_s=0.02, per_token_s=6e-4, per_token_squared_s=2e-7),
    "that of a preset": PROFILES[DEFAULT_PROFILE].prefill_cost,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("seconds", [0.01, 0.03, 0.2])
def test_simulated_engines_decode_in_the_time_that_was_measured(cost: PrefillCost, seconds: float) -> None:
    announced = joined("e", prefill=cost, decode=DecodeCost(step_s=seconds))
    profile, unmeasured = profile_of(announced), profile_of(msgspec.structs.replace(announced, decode=None))
    mirror = FleetMirror(profile=profile)
    twice = mirror.profile_of(Scenario(slow_instances={0: 2.0}), 0)

    assert profile.decode_cost.step_s == seconds
    assert StepCost(profile).step(0, 0, 1, 100) == pytest.approx(seconds, rel=0.05)
    assert StepCost(profile).decode_steps(1, 100, 10) == pytest.approx(10 * seconds, rel=0.05)
    assert StepCost(twice).step(0, 0, 1, 100) == pytest.approx(seconds / 2, rel=0.05)
    for chunk in (16, 2048):
        assert StepCost(profile).step(chunk, chunk**2, 0, 0) == StepCost(unmeasured).step(chunk, chunk**2, 0, 0)
        assert StepCost(profile).step(chunk, chunk**2, 1, 100) >= StepCost(unmeasured).step(chunk, chunk**2, 0, 0)


def test_an_engine_that_announces_the_cost_of_its_preset_is_that_preset() -> None:
    preset = PROFILES[DEFAULT_PROFILE]
    announced = joined("e", prefill=preset.prefill_cost, decode=preset.decode_cost)

    assert profile_of(announced) == replace(preset, kv_capacity_tokens=announced.kv_capacity_tokens)


def test_what_decodes_or_hits_otherwise_is_not_reproduced(entries: list[LogEntry]) -> None:
    report = summarise(read_record(entries, origin="a log", settings=SETTINGS).outcome)
    assert report.tpot.p50_s
    assert report.hit_rate
    slower = replace(report, tpot=replace(report.tpot, p50_s=report.tpot.p50_s * 1.5))
    colder = replace(report, hit_rate=report.hit_rate - 0.15)

    assert fidelity(report, report)[0]
    for other, part in ((slower, "TPOT P50 +50%"), (colder, "hit rate -15.0 points")):
        well, told = fidelity(report, other)
        assert (well, f"record: {part} is too far from it" in told) == (False, True), told


def test_of_several_answers_one_is_simulated(entries: list[LogEntry]) -> None:
    """Four answers of 18 tokens in all."""
    told = _changed(entries, RequestArrived, lambda event: {"answers": 4} if event.request == "r-7" else {})
    told = _changed(told, RequestFinished, lambda event: {"completion_tokens": 18} if event.request == "r-7" else {})
    record = read_record(told, origin="a log", settings=SETTINGS)

    assert Counter(request.output_tokens for request in record.requests) == {20: 239, 5: 1}
    assert Counter(row.output_tokens for row in record.outcome.rows) == {20: 239, 5: 1}
    assert any(note.startswith("1 requests asked for several answers (n)") for note in record.notes)


def test_prompts_that_nobody_knows_are_simulated_as_new_ones(entries: list[LogEntry]) -> None:
    told = _changed(entries, RequestArrived, lambda event: {"keys": b""} if event.request[-1] == "7" else {})
    record = read_record(told, origin="a log", settings=SETTINGS)
    fleet = ReplayedFleet(record)

    outcome = outcome_of(fleet.run(fleet.scenario))

    unknown = [row for row in outcome.rows if not record.requests[row.number].keys]
    assert len(unknown) == 24
    assert {row.end for row in outcome.rows} == {"finished"}
    assert {row.cached_tokens for row in unknown} == {0}
    assert [note.split(" (")[0] for note in record.notes] == ["24 requests have prompts that are not known in whole"]


@pytest.mark.parametrize(("status", "simulated"), [(400, 239), (500, 240)])
def test_what_an_engine_refused_for_its_client_is_no_failure(
    entries: list[LogEntry], status: int, simulated: int
) -> None:
    finished = next(e for e in entries if isinstance(e.event, RequestFinished) and e.event.request == "r-7")
    assert isinstance(finished.event, RequestFinished)
    refused = RequestFailed(at=finished.event.at, request=RequestId("r-7"), reason="engine_refused", status=status)
    record = read_record(rewritten(entries, finished.sequence, refused), origin="a log", settings=SETTINGS)

    assert len(record.requests) == simulated
    assert summarise(record.outcome).failures == simulated - 239
    assert record.notes == [
        "1 requests are left out: cancelled, refused by engines for what their clients asked, or without an end"
        if status == 400
        else "1 requests failed; failures are not simulated"
    ]


def test_notes_say_where_the_simulated_fleet_is_another(entries: list[LogEntry]) -> None:
    def notes(told: list[LogEntry]) -> str:
        return "; ".join(read_record(told, origin="a log", settings=SETTINGS).notes)

    larger = _changed(
        entries, InstanceJoined, lambda event: {"kv_capacity_tokens": 10**6} if event.instance == "engine-3" else {}
    )
    adapted = _changed(entries, RequestArrived, lambda event: {"adapter": "sql"} if event.request == "r-7" else {})
    tiered = _changed(entries, BlocksStored, lambda _: {"tier": "host"})

    assert notes(entries) == ""
    assert notes(larger) == "engine-3: another cost model or KV cache than most; simulated as one of them"
    assert notes(adapted) == "1 requests are for LoRA adapters: every simulated engine has them all"
    assert (
        notes(tiered)
        == "engines load from slower cache tiers: they are not simulated, and what is only there is computed"
    )


@pytest.mark.parametrize("bound", ["requests", "key bytes"])
def test_a_span_with_more_requests_than_can_be_simulated_is_refused(
    entries: list[LogEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Of earlier requests as many warm the caches as fit."""
    keys = [len(entry.event.keys) for entry in entries if isinstance(entry.event, RequestArrived)]
    bounds = TrafficBounds(requests=100) if bound == "requests" else TrafficBounds(key_bytes=sum(keys[-100:]))
    monkeypatch.setattr("pointsman_cli.what_if.inputs.read_record", partial(read_record, bounds=bounds))
    refused = what_if(entries, tmp_path, "--policy", "min_ttft")
    later = entries[
        next(n for n, entry in enumerate(entries) if entry.event is not None and entry.event.at > 60)
    ].sequence
    record = read_record(
        entries, origin="a log", settings=SETTINGS, since=lambda entry: entry.sequence >= later, bounds=bounds
    )

    assert refused.exit_code == 2
    assert re.search(r"more than 100(,000)? requests or .*: give --since", refused.output)
    assert len(record.requests) == 100
    assert len(record.requests) - record.warmup == pytest.approx(240 - 59 / 0.4, abs=2)
    assert any(note.startswith("140 earlier requests are left out") for note in record.notes)


@pytest.mark.parametrize("date", ["arrived_at", "at"])
def test_a_date_of_another_century_does_not_have_every_second_until_then_simulated(
    entries: list[LogEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, date: str
) -> None:
    monkeypatch.setattr(simulator, "SLICED_DAYS_MAX", 0.1)
    kind = RequestArrived if date == "arrived_at" else PrefillFinished
    number = next(n for n in range(len(entries) - 1, 0, -1) if isinstance(entries[n].event, kind))
    event = entries[number].event
    assert event is not None
    late = msgspec.structs.replace(event, **{date: getattr(event, date) + 1e9})

    refused = what_if(rewritten(entries, entries[number].sequence, late), tmp_path, "--policy", "min_ttft")

    assert refused.exit_code == 2
    assert "cannot be simulated: they take more than 0.1 days" in refused.output


@pytest.mark.parametrize("end", ["given up", "no instance", "failed"])
@pytest.mark.parametrize("tenant", ["t", "other"])
def test_a_request_that_came_again_under_another_id_is_simulated_once(
    entries: list[LogEntry], end: str, tenant: str
) -> None:
    place, arrival = next(
        (n, e.event) for n, e in enumerate(entries) if isinstance(e.event, RequestArrived) and e.event.request == "r-7"
    )
    lost, at = RequestId("lost"), arrival.at
    ends: dict[str, LogEvent] = {
        "given up": given_up("lost", at=at),
        "no instance": rejected("lost", "no_instance", at=at),
        "failed": RequestFailed(at=at, request=lost, reason="engine_failed", status=502),
    }
    first = msgspec.structs.replace(arrival, request=lost, tenant=Tenant(tenant))
    again = msgspec.structs.replace(arrival, instead_of=lost)
    events = [e.event for e in entries]
    events[place : place + 1] = [first, ends[end], again]
    told = [LogEntry(n, "pm.default.x", b"", event) for n, event in enumerate(events, start=1)]
    record = read_record(told, origin="a log", settings=SETTINGS)

    renamed = end != "failed" and tenant == "t"
    has_row = not renamed and end != "given up"
    assert len(record.requests) == len(record.outcome.rows) == 240 + has_row
    assert any("left out" in note for note in record.notes) == (end == "given up" and not renamed)


def _changed(entries: list[LogEntry], kind: type[Event], fields: Callable[[Any], dict[str, Any]]) -> list[LogEntry]:
    return [
        msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, **fields(entry.event)))
        if isinstance(entry.event, kind)
        else entry
        for entry in entries
    ]


def test_a_pool_that_splits_prefill_and_decode_is_refused(entries: list[LogEntry], tmp_path: Path) -> None:
    sequence, joined = next((e.sequence, e.event) for e in entries if isinstance(e.event, InstanceJoined))
    told = rewritten(entries, sequence, msgspec.structs.replace(joined, role="prefill"))
    refused = what_if(told, tmp_path, "--policy", "min_ttft")

    assert refused.exit_code == 2
    assert "only prefill or only decode" in refused.output


def test_moves_that_are_not_simulated_are_told_above_the_table(entries: list[LogEntry], tmp_path: Path) -> None:
    place, placed = next((n, e.event) for n, e in enumerate(entries) if isinstance(e.event, RequestPlaced))
    moved = RequestMigrated(
        at=placed.at, request=placed.request, source=placed.instance, instance=InstanceId("engine-3"), hit_blocks=0,
        uncached_tokens=placed.uncached_tokens, prefill_seconds=1.0, predicted_ttft=1.0, reason="by hand",
    )  # fmt: skip
    told = [*entries[: place + 1], msgspec.structs.replace(entries[place], event=moved), *entries[place + 1 :]]
    told = [msgspec.structs.replace(entry, sequence=number) for number, entry in enumerate(told, start=1)]

    assert not any("moved" in note for note in read_record(entries, origin="a log", settings=SETTINGS).notes)
    assert any(
        "1 times a request was moved" in note for note in read_record(told, origin="a log", settings=SETTINGS).notes
    )


def test_what_if_a_tenant_had_half(tmp_path: Path) -> None:
    """Tenants `a` and `b` send 1.25 requests a second each; `a` may send 1."""
    known = TenantPolicies(tenants={Tenant("a"): TenantPolicy(requests_per_second=1.0)})
    entries = ServedLog(requests=240, policies=POLICIES, tenants=("a", "b"), limits=known).entries
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.b]\nrequests_per_second = 0.25\n")

    half = numbers(entries, tmp_path, "--set", "tenants.a.requests_per_second=0.5")
    other = numbers(entries, tmp_path, "--tenants", str(file))["changed"]["by_tenant"]
    shown = what_if(entries, tmp_path, "--set", "tenants.a.requests_per_second=0.5").output

    recorded, again, changed = (half[side]["by_tenant"] for side in ("recorded", "resimulated", "changed"))
    assert recorded["a"]["requests"] == recorded["b"]["requests"] == 120
    assert recorded["a"]["served"] == again["a"]["served"] == pytest.approx(96, abs=8)
    assert changed["a"]["served"] == pytest.approx(48, abs=4)
    assert changed["a"]["over_limits"] == 120 - changed["a"]["served"]
    assert (changed["b"]["served"], changed["b"]["over_limits"]) == (120, 0)
    assert other["a"]["served"] == 120
    assert other["b"]["served"] == pytest.approx(24, abs=4)
    assert f"{changed['a']['served']} served" in shown


def test_limits_that_no_tenant_can_have_are_refused(entries: list[LogEntry], tmp_path: Path) -> None:
    for text in ("tenants.a.no_such=1", "tenants.a.concurrency=few", "tenants.concurrency=1"):
        refused = what_if(entries, tmp_path, "--set", text)
        assert (refused.exit_code, "Error" in refused.output) == (2, True), text


def test_pictures_are_drawn(entries: list[LogEntry], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = what_if(entries, tmp_path, "--policy", "min_ttft", "--plot", str(tmp_path / "pictures"))

    assert result.exit_code == 0
    names = {picture.name for picture in (tmp_path / "pictures").iterdir()}
    assert {"ttft_cdf.png", "prompt_lengths.png"} <= names
