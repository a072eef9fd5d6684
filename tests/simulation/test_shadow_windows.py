"""Windows of a shadow policy have the numbers of `pointsman what-if` for the same arrivals, and those of `simulate`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pointsman.analysis.shadow import Shadow, ShadowSummary, shadow_choice
from pointsman.analysis.shadow_windows import WAITING_MAX, ShadowWindows
from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import subject_of
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, Tenant, Term, WallSeconds
from pointsman.simulation.metrics import summarise
from pointsman.simulation.simulator import Scenario, Simulation, simulate
from pointsman.simulation.workload import GENERATORS, WorkloadRequest
from pointsman.state.state import PoolSettings, State
from tests.support.commands import told_by, written
from tests.support.events import BLOCK, reported
from tests.support.ladder_truth import WatchedCaches
from tests.support.recorded_log import RecordedFleet
from tests.support.served_log import ServedLog

SETTINGS = PoolSettings(block_tokens=BLOCK)
WINDOW = 30.0
CHOICES = {
    "min_ttft": ["--policy", "min_ttft"],
    "dualmap:ttft_slo_threshold=2": ["--policy", "dualmap", "--set", "routing.ttft_slo_threshold=2"],
    "round_robin:order=edf": ["--policy", "round_robin", "--order", "edf"],
    "least_loaded:admission=predicted_ttft": ["--policy", "least_loaded", "--admission", "predicted_ttft"],
}
PAIRS = [
    ("min_ttft", "dualmap:ttft_slo_threshold=2"),
    ("round_robin:order=edf", "min_ttft"),
    ("least_loaded:admission=predicted_ttft", "dualmap:ttft_slo_threshold=2"),
]


def slow_engine() -> list[LogEntry]:
    policies = policy_set(routing="round_robin", admission="none")
    return ServedLog(requests=160, gap=0.4, pace={"engine-2": 3.0}, policies=policies).entries


def limited_tenants() -> list[LogEntry]:
    limits = TenantPolicies(tenants={Tenant("a"): TenantPolicy(requests_per_second=1.0)})
    return ServedLog(requests=160, tenants=("a", "b"), limits=limits, families=40).entries


def simulated() -> list[LogEntry]:
    requests = GENERATORS["chat"](170, rate=2.5, chance=Random(4))
    scenario = Scenario(instances=3, routing="pointsman", prefill_only=False, block_tokens=BLOCK)
    return log_of(scenario, requests)


LOGS = {"slow engine": slow_engine, "limited tenants": limited_tenants, "simulated chats": simulated}


def log_of(scenario: Scenario, requests: Sequence[WorkloadRequest]) -> list[LogEntry]:
    """What a fleet would have written in a simulation."""
    simulation = WatchedCaches(scenario, requests)
    simulation.run()
    policies = policy_set(routing=scenario.routing, ordering=scenario.ordering, admission=scenario.admission)
    settings = asdict(simulation.state.settings)
    elected = LeaderElected(
        at=0.0, term=Term(1), scheduler="s", as_of=0, pool=settings, policy=scenario.routing, settings=policies.settings
    )
    return [_entry(number, event) for number, event in enumerate([elected, *simulation.log], start=1)]


def _entry(number: int, event: LogEvent) -> LogEntry:
    payload = encode(event)
    return LogEntry(number, subject_of(PoolName("default"), event), payload, decode_event(payload))


def followed(entries: Sequence[LogEntry], *texts: str, window: float = WINDOW, works: bool = True) -> ShadowSummary:
    state = State(SETTINGS)
    shadow = Shadow([shadow_choice(text) for text in texts], state, window_seconds=WallSeconds(window))
    for entry in entries:
        state.apply_entry(entry)
        shadow.apply(entry)
        while works and shadow.work():
            pass
    shadow.finish()
    while shadow.work():
        pass
    return shadow.summary()


def what_if(entries: Sequence[LogEntry], file: Path, *arguments: str) -> dict[str, Any]:
    return told_by("what-if", "--from", str(written(entries, file.parent, file.name)), *arguments)


@pytest.mark.parametrize(("name", "first", "second"), [(name, *pair) for name, pair in zip(LOGS, PAIRS, strict=True)])
def test_each_window_has_the_numbers_of_the_command(name: str, first: str, second: str, tmp_path: Path) -> None:
    entries = LOGS[name]()

    summary = followed(entries, first, second)

    assert summary.simulated == len(summary.windows) >= 2, summary.window_problem
    assert not summary.shed
    for window in summary.windows:
        read = entries[: window.closed_at]
        arrivals = [e.event for e in entries if isinstance(e.event, RequestArrived)]
        assert window.warmup_seconds == WINDOW
        assert window.requests == sum(window.since < event.at <= window.until for event in arrivals)
        for choice in (first, second):
            moments = ["--since", f"@{window.since}", "--until", f"@{window.until}", "--warmup", f"{WINDOW}"]
            told = what_if(read, tmp_path / "log.pmlog", *CHOICES[choice], *moments)
            shadow = window.shadows[choice]
            assert msgspec.to_builtins(shadow.regret) == told["regret"]
            for figures, side in (
                (window.recorded, "recorded"),
                (window.running, "resimulated"),
                (shadow.figures, "changed"),
            ):
                report = told[side]["report"]
                assert figures.ttft_p50_s == report["ttft"]["p50_s"], side
                assert figures.ttft_p90_s == report["ttft"]["p90_s"], side
                assert figures.hit_rate == report["hit_rate"], side
                assert figures.effective_capacity == report["effective_capacity"], side
            assert (window.requests, window.reproduced, window.fidelity) == (
                told["requests"], told["reproduced"], told["fidelity"],
            )  # fmt: skip


@pytest.mark.parametrize(
    ("generator", "running", "other"),
    [
        ("chat", "round_robin", "pointsman"),
        ("gsp_mixed", "least_loaded", "cache_affinity"),
        ("tools", "random", "min_ttft"),
        ("chat", "sticky_least_loaded", "dualmap"),
    ],
)
def test_regret_is_that_of_two_simulations_of_the_same_arrivals(generator: str, running: str, other: str) -> None:
    """The shadow knows but the log of the first."""
    requests = GENERATORS[generator](120, rate=2.5, chance=Random(9))
    scenario = Scenario(instances=3, routing=running, prefill_only=False, block_tokens=BLOCK)
    before, after = (simulate(replace(scenario, routing=routing), requests) for routing in (running, other))
    later = [replace(request, arrival_s=request.arrival_s + 1.0) for request in requests]  # none at the window's begin

    window = followed(log_of(scenario, later), other, window=10_000.0).windows[0]

    one, two, found = summarise(before), summarise(after), window.shadows[other]
    exactly = partial(pytest.approx, rel=1e-9, abs=1e-9)
    saved = [a.ttft - b.ttft for a, b in zip(before.rows, after.rows, strict=True) if a.ttft and b.ttft]
    assert window.requests == len(saved) == 120
    assert (window.running.ttft_p50_s, window.running.ttft_p90_s) == exactly((one.ttft.p50_s, one.ttft.p90_s))
    assert (found.figures.ttft_p50_s, found.figures.ttft_p90_s) == exactly((two.ttft.p50_s, two.ttft.p90_s))
    assert (found.regret.ttft_mean_s, found.regret.hit_rate) == exactly(
        (sum(saved) / len(saved), (two.hit_rate or 0.0) - (one.hit_rate or 0.0))
    )
    assert found.regret.ttft_mean_s


@pytest.mark.parametrize("routing", sorted(ROUTING_POLICIES))
def test_a_simulation_in_slices_is_the_simulation(routing: str) -> None:
    requests = GENERATORS["chat"](40, rate=4.0, chance=Random(2))
    scenario = Scenario(instances=3, routing=routing, prefill_only=False, tenant_policies=((0.0, TenantPolicies()),))
    outcomes = []

    def sliced() -> Iterator[float]:
        outcomes.append((yield from Simulation(scenario, requests).slices(7)))

    shares = list(sliced())

    assert outcomes[0].rows == simulate(scenario, requests).rows
    assert shares == sorted(shares)
    assert len(shares) > 20


def test_what_cannot_be_simulated_in_time_is_shed_and_counted() -> None:
    entries = slow_engine()

    whole, idle = followed(entries, "min_ttft", window=20.0), followed(entries, "min_ttft", window=20.0, works=False)

    assert (whole.shed, idle.shed) == (0, whole.simulated + whole.unusable - WAITING_MAX)
    assert idle.shed > 0
    assert idle.simulated + idle.unusable == WAITING_MAX
    assert all(window in whole.windows for window in idle.windows)


def test_windows_with_few_requests_or_unfit_policies_say_so() -> None:
    entries = slow_engine()

    short = followed(entries, "min_ttft", window=10.0)
    unfit = followed(entries, "min_ttft", "round_robin:admission.no_such=1")

    assert not short.windows
    assert (short.unusable > 3, "too few" in short.window_problem) == (True, True)
    assert unfit.windows
    for window in unfit.windows:
        assert list(window.shadows) == ["min_ttft"]
        assert "no_such" in window.problems["round_robin:admission.no_such=1"]


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_joins_leaves_restarts_and_fails_breaks_nothing(seed: int) -> None:
    fleet = RecordedFleet(policy_set(routing="pointsman"), seed, failing=True, limited=True).live(900)
    fleet.take_over()
    entries = fleet.live(900).write_all().entries

    for begun in (entries, entries[777:]):
        summary = followed(begun, "min_ttft", "round_robin", window=30.0)

        assert summary.simulated + summary.unusable + summary.shed >= 2
        assert summary.window_problem == "" or summary.unusable or summary.shed


@pytest.mark.parametrize("place", [0, 5, 400])
def test_a_clock_that_is_far_ahead_stops_no_windows(place: int) -> None:
    entries = slow_engine()
    wrong = reported("engine-1", 0, [], at=1e12)
    entries = [
        _entry(n, e.event)
        for n, e in enumerate([*entries[:place], _entry(1, wrong), *entries[place:]], start=1)
        if e.event
    ]

    windows = ShadowWindows({}, State(SETTINGS), None, seconds=WallSeconds(WINDOW), waiting_max=100)
    for entry in entries:
        windows.take(entry)

    assert len(windows._waiting) >= 2
    assert all(window.until < 1000.0 for window in windows._waiting)


def test_windows_grow_with_less_traffic_and_are_not_counted_before_their_caches_are_warm() -> None:
    entries = ServedLog(requests=1200, gap=0.4, families=6).entries
    state = State(SETTINGS)
    for entry in entries[:600]:
        state.apply_entry(entry)
    windows = ShadowWindows({}, state, None, waiting_max=100)
    for entry in entries[600:]:
        state.apply_entry(entry)
        windows.take(entry)

    began = entries[600].event
    assert began is not None
    closed = windows._waiting
    assert all(window.since - window.warmup >= began.at for window in closed)
    lengths = [window.until - window.since for window in closed]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]
    assert all(one.until == following.since for one, following in pairwise(closed))
