"""Cache isolation on a real engine: two tenants with keys send the same prompts through ingress, scheduler and worker. The
engine reports no cached token across them and all of them within; its KV events have the keys that the ingress computes."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.isolation import STORY, bodies, check_isolation
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.tenants import ALICE, BOB, KEYS
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually
from tests.vllm.conftest import BootEngine

PROBE_SECONDS_MAX = 120.0


@pytest.fixture(scope="module")
def engine(boot_engine: BootEngine) -> Iterator[RunningEngine]:
    with boot_engine() as running:
        yield running


@pytest.fixture
async def fleet(engine: RunningEngine, vllm_home: EngineHome) -> AsyncIterator[SplitFleet]:
    place = EnginePlace(engine.url, engine.kv, engine.replay)
    told: dict[str, Any] = {"keys": KEYS, "probe": True, "tokenizer": str(vllm_home.model)}
    async with split_fleet({"engine-1": place}, block_tokens=BLOCK_TOKENS, **told) as opened:
        yield opened


async def test_two_tenants_share_nothing_and_each_has_all_of_its_own(
    fleet: SplitFleet, tell_what_was_measured: Callable[[str], None]
) -> None:
    known = fleet.scheduler.state.fleet
    await eventually(lambda: known.instances[0].parity is not None, seconds=PROBE_SECONDS_MAX)
    assert known.instances[0].parity, "a salted prompt has the same keys in the engine's events"

    for path, body in bodies(SERVED_MODEL).items():
        await check_isolation(fleet.http, fleet.url, path, body, block_tokens=BLOCK_TOKENS)

    events = [entry.event for entry in await fleet.pool.entries()]
    groups = {event.request: event.cache_group for event in events if isinstance(event, RequestArrived)}
    ends = [event for event in events if isinstance(event, RequestFinished)]
    cached = {group: sum(e.cached_tokens for e in ends if groups[e.request] == group) for group in groups.values()}
    assert set(cached) == {"tenant:alice", "tenant:bob"}
    assert cached["tenant:alice"] == cached["tenant:bob"] > 0
    assert all(end.cached_tokens == end.predicted_cached_tokens for end in ends)
    tell_what_was_measured(f"two tenants, {len(ends)} requests: cached tokens {cached}, none across")


async def test_vectors_are_made_from_prefixes_of_the_tenant_alone(
    boot_engine: BootEngine, tell_what_was_measured: Callable[[str], None]
) -> None:
    with boot_engine("--runner", "pooling", "--convert", "embed") as engine:
        place = EnginePlace(engine.url, engine.kv, engine.replay)
        told: dict[str, Any] = {"keys": KEYS, "tokenizer": ""}
        async with split_fleet({"engine-1": place}, block_tokens=BLOCK_TOKENS, **told) as fleet:
            hits = []
            for tenant in (ALICE, BOB, ALICE, BOB):
                before = engine.metric("vllm:prefix_cache_hits_total")
                await _embedded(fleet.http, fleet.url, tenant)
                hits.append(engine.metric("vllm:prefix_cache_hits_total") - before)

    assert hits[:2] == [0.0, 0.0]
    assert hits[2] == hits[3] > 0
    tell_what_was_measured(f"two tenants, embeddings: prefix cache hits of first and second requests {hits}")


async def _embedded(client: aiohttp.ClientSession, url: str, tenant: dict[str, str]) -> None:
    body = {"model": SERVED_MODEL, "input": STORY}
    async with client.post(f"{url}/v1/embeddings", json=body, headers=tenant) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
