"""A real fleet's log, read from the running stream, from the recorder's archive and from an exported file: one answer."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pointsman_cli.discovery import find_fleet
from pointsman_cli.main import main
from tests.support.commands import told_by
from tests.support.up import POINTSMAN, RunningUp, pointsman_up

CAUGHT_UP_SECONDS_MAX = 20.0
LEADS_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Kept:
    """One log in three places, each as the options that name it, up to entry `last`."""

    places: tuple[tuple[str, str], ...]
    last: int
    served: tuple[dict[str, Any], ...]
    """What the clients counted, of what engines reported to them."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """The log of a fleet that has served requests under two leaders, of which the first was killed."""
    directory = tmp_path_factory.mktemp("history")
    with pointsman_up(directory, "--instances", "2", "--speed", "50", "--slo-ttft", "100") as up:
        up.wait_for("Stop +Ctrl-C")
        served = [_serve_requests(up)]
        os.kill(find_fleet(data=up.data).of_role("scheduler")[0].pid, signal.SIGKILL)
        _wait_until_somebody_leads(up)
        served.append(_serve_requests(up))
        bundle, archive = directory / "log.pmlog", up.data / "archive.sqlite"
        last = told_by("export", str(bundle), "--from", str(up.data))["entries"]
        _wait_until_archived(archive, last)
        yield Kept((("--from", str(up.data)), ("--from", str(archive)), ("--from", str(bundle))), last, tuple(served))


def _wait_until_somebody_leads(up: RunningUp) -> None:
    """Before that, an ingress places requests itself."""
    deadline = time.monotonic() + LEADS_SECONDS_MAX
    while CliRunner().invoke(main, ["fleet", "--from", str(up.data)]).exit_code != 0:
        assert time.monotonic() < deadline, "nobody leads again"
        time.sleep(0.1)


def _serve_requests(up: RunningUp) -> dict[str, Any]:
    asked = ("--from", str(up.data), "--workload", "chat", "--requests", "40", "--rate", "4")
    out = up.data.parent / "bench.json"
    subprocess.run([POINTSMAN, "bench", *asked, "--out", str(out)], capture_output=True, timeout=60, check=True)
    served: dict[str, Any] = json.loads(out.read_text())["runs"][0]
    return served


def _wait_until_archived(archive: Path, last: int) -> None:
    deadline = time.monotonic() + CAUGHT_UP_SECONDS_MAX
    while told_by("replay", "--from", str(archive))["last"] < last:
        assert time.monotonic() < deadline, "the recorder does not catch up"
        time.sleep(0.2)


def test_a_real_log_with_a_takeover_verifies_alike_from_all_three_places(log: Kept) -> None:
    verdicts = [told_by("replay", "--verify", "--until", str(log.last), *place)["verdict"] for place in log.places]

    live = verdicts[0]
    assert (live["different"], live["unchecked"], live["problems"]) == (0, {}, [])
    assert live["identical"] == live["decisions"] > 60
    assert [term["term"] for term in live["terms"]] == [1, 2]
    assert all(term["decisions"] > 30 for term in live["terms"])
    assert verdicts[1:] == [live, live]


def test_usage_is_what_the_engines_served_from_all_three_places(log: Kept) -> None:
    reports = [told_by("usage", "--until", str(log.last), *place) for place in log.places]

    total = reports[0]["total"]
    prompt, output = (sum(run[name] for run in log.served) for name in ("prompt_tokens", "output_tokens"))
    cached = sum(run["hit_rate"] * run["prompt_tokens"] for run in log.served)
    assert total["finished"] == sum(run["completed"] for run in log.served) > 60
    assert total["output_tokens"] == output
    assert total["cached_tokens"] == pytest.approx(cached, abs=1)
    assert total["computed_tokens"] + total["cached_tokens"] == prompt
    assert total["engine_seconds"] > 0
    assert [report["rows"] for report in reports[1:]] == [reports[0]["rows"]] * 2


def test_the_hit_rate_ladder_is_the_same_from_all_three_places_and_ends_with_what_was_served(log: Kept) -> None:
    ladders = [told_by("hit-rate", "--until", str(log.last), *place) for place in log.places]

    pool = ladders[0]["pool"]
    cached = sum(run["hit_rate"] * run["prompt_tokens"] for run in log.served)
    assert pool["requests"] == sum(run["completed"] for run in log.served)
    assert pool["prompt_tokens"] == sum(run["prompt_tokens"] for run in log.served)
    assert pool["tokens"]["delivered"] == pytest.approx(cached, abs=1)
    assert [(ladder["pool"], ladder["tenants"]) for ladder in ladders[1:]] == [(pool, ladders[0]["tenants"])] * 2


def test_what_a_running_fleet_has_on_disk_and_in_its_processes_is_its_owners_alone(log: Kept) -> None:
    data = Path(log.places[0][1])
    fleet, secret = find_fleet(data=data), (data / "secret").read_text().strip()

    open_to_others = [
        path for path in (data, *data.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert open_to_others == []
    assert Path(log.places[2][1]).stat().st_mode & 0o777 == 0o600  # the bundle
    for process in fleet.processes:
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert secret not in arguments, process.name
    for engine in fleet.of_role("engine"):
        assert "POINTSMAN_SECRET" not in Path(f"/proc/{engine.pid}/environ").read_text()


def test_the_state_at_an_entry_is_the_same_from_all_three_places(log: Kept) -> None:
    states = [told_by("state", "--until", str(log.last // 2), *place) for place in log.places]

    for state in states:
        del state["origin"]
    assert len(states[0]["instances"]) == 2
    assert states[1:] == [states[0], states[0]]


def test_the_story_of_a_real_request_is_the_same_from_all_three_places(log: Kept) -> None:
    stories = [told_by("explain", "--slowest", "1", *place) for place in log.places]

    for story in stories:
        del story["origin"]
    told = stories[0]
    assert told["decisions"][0]["candidates"]
    assert sum(phase["seconds"] for phase in told["phases"]) == pytest.approx(told["end"]["e2e"], abs=1e-3)
    assert stories[1:] == [told, told]


def test_a_real_log_can_be_run_again_and_examined(log: Kept) -> None:
    bundle = log.places[-1]
    compared = told_by("what-if", "--policy", "round_robin", *bundle)
    examined = CliRunner().invoke(main, ["doctor", "--json", *bundle])

    assert compared["requests"] == 80
    assert compared["recorded"]["report"]["hit_rate"] == pytest.approx(
        compared["resimulated"]["report"]["hit_rate"], abs=0.25
    )
    assert any("the leader changed once" in finding["what"] for finding in json.loads(examined.stdout)["findings"])
