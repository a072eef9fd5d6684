"""Two releases that follow each other, both really installed, in one fleet under load: rolled forward process by process,
schedulers first, then back. No request is lost or answered twice, and this release decides every decision again as it was,
whoever made it. Run by `make test-upgrade`."""

import asyncio
import json
import subprocess
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.requests import RequestAttemptFailed, RequestCancelled, RequestFailed, RequestFinished
from pointsman_cli.history.bundle import BundleHistory
from tests.upgrade.mixed_fleet import ENGINES, NOW, MixedFleet, load_on, mixed_fleet
from tests.upgrade.older_release import BEFORE, is_reachable, python_of

pytestmark = [pytest.mark.upgrade, pytest.mark.timeout(600)]

RATE = 15.0
PHASE_SECONDS = 4.0
OTHERS = ("ingress-1", "ingress-2", *(f"worker-{engine}" for engine in ENGINES), "recorder-1", "rebalancer-1")
ENDS = (RequestFinished, RequestFailed, RequestCancelled)


@pytest.fixture(scope="module")
def before() -> Path:
    if not is_reachable():
        message = f"NOT TESTED: commit {BEFORE}, the release before, is not in this checkout (git fetch --unshallow)"
        warnings.warn(pytest.PytestWarning(message), stacklevel=1)
        pytest.skip(message)
    return python_of()


@pytest.fixture
async def fleet(tmp_path: Path, before: Path) -> AsyncIterator[MixedFleet]:
    async with mixed_fleet(tmp_path, before) as running:
        yield running


async def test_a_fleet_is_rolled_forward_and_back_under_load(fleet: MixedFleet, before: Path, tmp_path: Path) -> None:
    releases = []
    async with load_on(fleet, RATE) as load:

        async def watch(phase: str) -> None:
            load.phase = phase
            await asyncio.sleep(PHASE_SECONDS)
            leader = await fleet.leader()
            releases.append((phase, fleet.processes[leader].python == NOW))

        async def upgrade(*names: str, to: Path) -> None:
            for name in names:
                await fleet.replace(name, to)

        await watch("all old")
        load.phase = "schedulers forward"
        await upgrade("scheduler-1", "scheduler-2", to=NOW)
        await watch("new leader, old others")
        load.phase = "others forward"
        await upgrade(*OTHERS, to=NOW)
        await watch("all new")
        load.phase = "schedulers back"
        await upgrade("scheduler-1", "scheduler-2", to=before)
        await watch("old leader, new others")
        load.phase = "others back"
        await upgrade(*OTHERS, to=before)
        await watch("all old again")
    file = tmp_path / "mixed.pmlog"
    await asyncio.to_thread(_pointsman, "export", str(file), "--from", fleet.nats)

    assert releases == [
        ("all old", False),
        ("new leader, old others", True),
        ("all new", True),
        ("old leader, new others", False),
        ("all old again", False),
    ]
    assert {end for _, end in load.ends} == {"whole"}, load.ends
    _nothing_is_doubled(file, set(load.answered))
    _decided_again_as_it_was(file)


def _nothing_is_doubled(file: Path, answered: set[str]) -> None:
    ends, leaders = Counter[str](), []
    for entry in BundleHistory(file):
        event = entry.event
        assert event is not None, entry.problem
        assert not isinstance(event, RequestAttemptFailed), event
        if isinstance(event, ENDS) and event.request in answered:
            ends[f"{event.request} {type(event).__name__}"] += 1
        elif isinstance(event, LeaderElected):
            leaders.append(event.wire)

    assert ends == {f"{request} RequestFinished": 1 for request in answered}
    assert {0, 1} <= set(leaders)


def _decided_again_as_it_was(file: Path) -> None:
    replayed = _pointsman("replay", "--from", str(file), "--verify", "--json")
    verdict = json.loads(replayed.stdout)["verdict"]

    assert (replayed.returncode, verdict["different"], verdict["unchecked"], verdict["problems"]) == (0, 0, {}, []), (
        verdict
    )
    assert verdict["decisions"] == verdict["identical"] > 0


def _pointsman(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(NOW.with_name("pointsman")), *arguments]
    return subprocess.run(command, capture_output=True, check=False, text=True)
