"""A whole fleet of simulated engines with a host tier: what devices evicted is a hit that is loaded back, the index keeps
each tier as its engine does, and replay decides the same."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp
import pytest
import pytest_asyncio

from pointsman.analysis.tier_shares import TierCounter
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId
from pointsman.state.state import PoolSettings, State
from pointsman_cli.discovery import find_fleet
from pointsman_cli.up.scripts import console_script
from tests.support.log_reading import events_in, link_to
from tests.support.patched_processes import patch_processes
from tests.support.up import pointsman_up

READY_SECONDS_MAX = 180.0
PULSE_SECONDS, REPORTED_SECONDS_MAX = 2.0, 60.0
"""A report of an idle engine reaches the log every half a minute in production."""
DEVICE_BLOCKS = 96
PROMPT_BLOCKS = 40
PROMPTS = 6
"""Over two engines more than their devices hold."""
ROUNDS = 3
BLOCK = 64


@dataclass(frozen=True)
class Run:
    events: Sequence[LogEvent]
    cached: list[int]
    """As the client was told, request by request."""
    verified: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("tiers")
        patch_processes(patch, directory, {"pointsman.policies.heard_reports.PULSE_WALL_SECONDS": PULSE_SECONDS})
        yield await _run(directory)


async def _run(directory: Path) -> Run:
    told = ("--instances", "2", "--kv-blocks", str(DEVICE_BLOCKS), "--speed", "10")
    with pointsman_up(directory, *told, "--engine-args", "--kv-offloading-size 8") as up:
        up.wait_for("Try it", READY_SECONDS_MAX)
        fleet = find_fleet(data=up.data)
        async with link_to(fleet) as link, aiohttp.ClientSession() as session:
            cached = [await _ask(session, fleet.ingress, fleet.model, prompt) for prompt in _prompts() * ROUNDS]
            asked = time.monotonic()
            events = await events_in(link.log)
            while not _all_reported(events[-20:]) and time.monotonic() - asked < REPORTED_SECONDS_MAX:
                await asyncio.sleep(0.2)
                events = await events_in(link.log)
        replayed = _verified(up.data)
        up.stop()
    return Run(events, cached, replayed)


def test_what_the_devices_evicted_is_loaded_back_and_was_predicted_so(run: Run) -> None:
    placed = [event for event in run.events if isinstance(event, RequestPlaced)]
    ends = [event for event in run.events if isinstance(event, RequestFinished)]
    again = slice(PROMPTS, None)

    assert [end.cached_tokens for end in ends] == run.cached
    assert min(run.cached[again]) == PROMPT_BLOCKS * BLOCK
    assert [end.predicted_cached_tokens for end in ends[again]] == run.cached[again]
    assert sum(bool(event.loads) for event in placed[again]) >= PROMPTS
    assert all(event.load_seconds > 0 for event in placed if event.loads)


def test_the_tokens_of_each_tier_add_up(run: Run) -> None:
    tiers = TierCounter()
    for event in run.events:
        tiers.apply(event)

    assert set(tiers.tokens) == {"device", "host"}
    assert tiers.tokens["host"] > 0
    assert sum(tiers.tokens.values()) == sum(run.cached)
    assert abs(sum(tiers.shares.values()) - 1.0) < 1e-9


def test_the_index_agrees_with_each_tier_of_each_engine(run: Run) -> None:
    state = State(PoolSettings())
    for sequence, event in enumerate(run.events, start=1):
        state.apply(event, sequence)
    last = {event.instance: event for event in run.events if isinstance(event, InstanceReported)}

    assert [instance.doubt for instance in state.fleet.instances] == ["", ""]
    for instance, report in last.items():
        assert [tier.tier for tier in report.tiers] == ["host"]
        assert state.slower.blocks("host", InstanceId(instance)) == report.tiers[0].blocks
        assert state.slower.digest("host", InstanceId(instance)) == report.tiers[0].digest
        assert report.blocks <= DEVICE_BLOCKS
    assert sum(report.tiers[0].blocks for report in last.values()) >= PROMPTS * PROMPT_BLOCKS


def test_replay_decides_the_same(run: Run) -> None:
    assert '"different": 0' in run.verified


def _all_reported(events: Sequence[LogEvent]) -> bool:
    """Each engine's worker, after the last event of a cache or a request."""
    reported = {event.instance for event in events if isinstance(event, InstanceReported) and event.tiers}
    return len(reported) == 2 and isinstance(events[-1], InstanceReported) and isinstance(events[-2], InstanceReported)


def _prompts() -> list[list[int]]:
    chance = Random(5)
    return [[chance.randrange(1000, 30_000) for _ in range(PROMPT_BLOCKS * BLOCK + 1)] for _ in range(PROMPTS)]


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int]) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        content = await answer.json()
        assert answer.status == 200, content
    await asyncio.sleep(0.25)  # the engine's events are folded
    return int(content["usage"]["prompt_tokens_details"]["cached_tokens"])


def _verified(data: Path) -> str:
    command = [str(console_script("pointsman")), "replay", "--verify", "--json", "--from", str(data)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
