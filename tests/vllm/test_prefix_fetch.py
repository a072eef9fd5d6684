"""A prefix fetched from one real engine by another (NIXL on the CPU): the second hits it without having computed it, and its
answer is that of the first. What a real source and target do where the prefix is gone is seen too."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.requests import PrefixFetchEnded, RequestFinished
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import verify
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually
from tests.vllm.test_split import FETCHED, nixl_pair

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The history of the lighthouse at the mouth of the river begins with a storm. " * 60

Pair = tuple[SplitFleet, RunningEngine, RunningEngine]


@pytest.fixture(scope="module")
def engines(
    vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    with nixl_pair(vllm_home, tmp_path_factory.mktemp("fetch"), roles=("kv_both", "kv_both")) as pair:
        yield pair


@pytest.fixture
async def fleet(engines: tuple[RunningEngine, RunningEngine], vllm_home: EngineHome) -> AsyncIterator[Pair]:
    """Requests go to the second engine, since the first is drained: it has what was asked of it before."""
    first, second = engines
    told = {"fetches": True, "engine_model": "smollm2-135m-cpu", "kv_transfer_gb_per_s": 1.0}
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, told)
        for name, engine in (("first", first), ("second", second))
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened, first, second


async def test_the_second_engine_hits_what_the_first_has_computed(fleet: Pair, unlike_any_other: str) -> None:
    whole, first, second = fleet
    index = whole.scheduler.state.index
    talk = {
        "model": SERVED_MODEL,
        "messages": [{"role": "system", "content": unlike_any_other + TEXT}, {"role": "user", "content": "And then?"}],
        "max_tokens": 10,
        "temperature": 0,
    }
    asked: list[dict[str, Any]] = [
        {"model": SERVED_MODEL, "prompt": unlike_any_other + TEXT + "Who saw it?", "max_tokens": 10, "temperature": 0},
        talk,
    ]
    alone = [
        await asyncio.to_thread(first.ask, path, body) for path, body in zip((COMPLETIONS, CHAT), asked, strict=True)
    ]
    await eventually(lambda: index.blocks(InstanceId("first")) * BLOCK_TOKENS >= 1_500, seconds=20.0)
    await whole.drain("first")
    fetched = second.metric(FETCHED)

    for number, (path, body, expected) in enumerate(zip((COMPLETIONS, CHAT), asked, alone, strict=True)):
        headers, answer = await whole.ask(path, f"r{number}", body)
        life = await whole.life_of(f"r{number}")
        placed = next(event for event in life if isinstance(event, RequestPlaced))
        ended = next(event for event in life if isinstance(event, PrefixFetchEnded))
        finished = next(event for event in life if isinstance(event, RequestFinished))
        print(json.dumps([ended.tokens, ended.seconds, ended.source_seconds, placed.transfer_seconds, finished.ttft]))

        assert headers["x-pointsman-instance"] == "second"
        assert answer["choices"][0] == expected["choices"][0]
        assert (placed.fetch_from, ended.failure) == ("first", "")
        assert finished.cached_tokens >= ended.tokens - BLOCK_TOKENS > 500
        assert second.metric(FETCHED) - fetched >= ended.tokens
        fetched = second.metric(FETCHED)

    await eventually(lambda: not whole.scheduler.state.workload.requests)
    verdict = verify(await whole.entries())
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])
