"""Cache isolation over the whole path: ingress, scheduler, worker and a simulated engine with a real cache behind it."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pointsman.contracts.decisions import RequestHandedOver
from pointsman.contracts.requests import RequestArrived
from pointsman.runtime.supervision import Supervisor
from pointsman_engine_sim.server import EngineServer, engine_server
from pointsman_engine_sim.settings import EngineSimSettings
from tests.support.engine_sim import FREE_PORTS
from tests.support.isolation import bodies, check_isolation
from tests.support.split_fleet import SPEED, EnginePlace, SplitFleet, simulated_split_fleet, split_fleet
from tests.support.tenants import ALICE, BOB, KEYS
from tests.support.waiting import eventually

BLOCK = 64
MODEL = "pointsman-sim"


@pytest.fixture
async def fleet() -> AsyncIterator[tuple[SplitFleet, EngineServer]]:
    async with Supervisor() as supervisor:
        settings = EngineSimSettings(speed=SPEED, block_size=BLOCK, kv_events_config=FREE_PORTS)
        async with engine_server(settings, supervisor) as server:
            place = EnginePlace(server.url, server.events_endpoint or "", server.replay_endpoint or "")
            told: dict[str, Any] = {"keys": KEYS, "probe": True}
            async with split_fleet({"engine-1": place}, speed=SPEED, **told) as opened:
                yield opened, server


async def test_nothing_is_shared_across_tenants_and_everything_within(fleet: tuple[SplitFleet, EngineServer]) -> None:
    opened, _ = fleet
    known = opened.scheduler.state.fleet
    await eventually(lambda: known.instances[0].parity is True, what="the probe, which is salted too")

    for path, body in bodies(MODEL).items():
        await check_isolation(opened.http, opened.url, path, body, block_tokens=BLOCK)

    arrived = [e.event for e in await opened.pool.entries() if isinstance(e.event, RequestArrived)]
    groups: dict[str, set[bytes]] = {}
    for event in arrived:
        keys = {event.keys[at : at + 8] for at in range(0, len(event.keys), 8)}
        groups.setdefault(event.cache_group, set()).update(keys)
    assert set(groups) == {"tenant:alice", "tenant:bob"}
    assert groups["tenant:alice"]
    assert not groups["tenant:alice"] & groups["tenant:bob"]


async def test_endpoints_without_a_count_are_salted_in_the_engine_too(fleet: tuple[SplitFleet, EngineServer]) -> None:
    opened, server = fleet
    cache = server.model.cache
    long = " is a question of the ferryman" * 60
    for path, body in {
        "/v1/embeddings": {"model": MODEL, "input": f"One{long}"},
        "/rerank": {"model": MODEL, "query": f"Two{long}", "documents": ["one"]},
        "/score": {"model": MODEL, "text_1": f"Three{long}", "text_2": "two"},
    }.items():
        sizes = []
        for tenant in (ALICE, ALICE, BOB, BOB):
            async with opened.http.post(opened.url + path, json=body, headers=tenant) as answer:
                assert answer.status == 200, await answer.text()
            sizes.append(len(cache.cached()))
        assert sizes[0] == sizes[1] < sizes[2] == sizes[3], path


async def test_both_engines_of_a_split_request_hold_it_under_one_salt() -> None:
    roles = {"p-1": "prefill", "d-1": "decode"}
    async with simulated_split_fleet(roles, keys=KEYS) as (opened, servers):
        path = "/v1/chat/completions"
        await check_isolation(opened.http, opened.url, path, bodies(MODEL)[path], block_tokens=BLOCK)

        handed = [e.event for e in await opened.pool.entries() if isinstance(e.event, RequestHandedOver)]
        assert {event.instance for event in handed} == {"d-1"}
        prefilled, decoded = (servers[name].model.cache.cached() for name in roles)
        assert prefilled & decoded, "one hash in both engines: one salt"


async def test_a_salt_that_vllm_refuses_is_refused_here(fleet: tuple[SplitFleet, EngineServer]) -> None:
    _, server = fleet
    async with aiohttp.ClientSession() as client:
        for salt in ("", "a/b", "x" * 129):
            body = {"model": MODEL, "prompt": [1, 2], "cache_salt": salt}
            async with client.post(f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status == 400
