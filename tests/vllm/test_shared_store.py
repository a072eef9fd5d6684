"""Two real engines that share a store of KV blocks, Mooncake's (over TCP) or LMCache's server: what the first computed is a hit
at the second, which loads it from the store and was predicted to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from pointsman.contracts.decisions import RequestPlaced, TierTokens
from pointsman.contracts.requests import RequestFinished
from pointsman.simulation.replay import verify
from pointsman.state.slower_tiers import STORE
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.kv_connectors import lmcache, mooncake_store
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually
from tests.vllm.test_split import FETCHED, connected_engines

TEXT = " ".join(["The history of the lighthouse at the mouth of the river begins with a storm."] * 40)
"""Its continuation is certain: of two words that are about as likely, the order of float sums would choose."""
HIT_TOKENS_MIN = 500

Pair = tuple[RunningEngine, RunningEngine]


@pytest.fixture(scope="module", params=[mooncake_store, lmcache])
def engines(
    request: pytest.FixtureRequest, vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("store")
    with (
        request.param(vllm_home, directory) as (connector, environment),
        connected_engines(vllm_home, directory, [connector] * 2, [environment] * 2) as (first, second),
    ):
        yield first, second


@pytest.fixture
async def fleet(engines: Pair, vllm_home: EngineHome) -> AsyncIterator[SplitFleet]:
    told = {"shared_kv_store": True, "engine_model": "smollm2-135m-cpu"}
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, told)
        for name, engine in zip(("first", "second"), engines, strict=True)
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened


async def test_the_second_engine_loads_what_the_first_has_stored(
    fleet: SplitFleet, engines: Pair, unlike_any_other: str, tell_what_was_measured: Callable[[str], None]
) -> None:
    first, second = engines
    asked: dict[str, Any] = {"model": SERVED_MODEL, "max_tokens": 10, "temperature": 0}
    asked["prompt"] = unlike_any_other + TEXT
    alone = await asyncio.to_thread(first.ask, "/v1/completions", asked)
    await asyncio.to_thread(first.ask, "/v1/completions", asked | {"prompt": "Its next step tells what was stored."})
    slower = fleet.scheduler.state.slower
    await eventually(lambda: slower.blocks("external", STORE) * BLOCK_TOKENS > HIT_TOKENS_MIN, seconds=60.0)
    await fleet.drain("first")
    loaded = second.metric(FETCHED)

    headers, answer = await fleet.ask("/v1/completions", "r", asked)
    life = await fleet.life_of("r")
    placed = next(event for event in life if isinstance(event, RequestPlaced))
    finished = next(event for event in life if isinstance(event, RequestFinished))
    verdict = verify(await fleet.pool.entries())
    tell_what_was_measured(f"shared store: {finished.cached_tokens} tokens loaded, TTFT {finished.ttft:.2f} s")

    assert headers["x-pointsman-instance"] == "second"
    assert answer["choices"][0] == alone["choices"][0]
    assert placed.loads == [TierTokens("external", finished.cached_tokens or 0)]
    assert finished.cached_tokens == finished.predicted_cached_tokens
    assert second.metric(FETCHED) - loaded == finished.cached_tokens > HIT_TOKENS_MIN
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
