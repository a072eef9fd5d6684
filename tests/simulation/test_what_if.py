"""A recorded log run again: the same policy gives the record back, a slow engine is slow again, less fleet is worse."""

import json
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from pointsman.analysis.recorded_traffic import read_record
from pointsman.analysis.what_if import ReplayedFleet
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, Tenant
from pointsman.simulation.outcome import Outcome
from pointsman.state.state import PoolSettings
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.sources import Header
from pointsman_cli.main import main
from tests.support.events import BLOCK
from tests.support.headless import write_headless
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


def what_if(entries: list[LogEntry], directory: Path, *arguments: str) -> Result:
    write_bundle(directory / "log.pmlog", Header(pool="default", last=entries[-1].sequence), entries)
    return CliRunner().invoke(main, ["what-if", "--from", str(directory / "log.pmlog"), *arguments])


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
    arguments = ("--policy", "min_ttft", "--json")
    result = CliRunner().invoke(main, ["what-if", "--from", str(file), *arguments])
    told, whole = json.loads(result.stdout), numbers(entries, tmp_path, "--policy", "min_ttft", "--since", "600")

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
