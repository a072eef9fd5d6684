"""KV caches that one simulated engine hands to another, over vLLM's protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from pointsman.primitives import RequestId, Tokens
from pointsman.simulation.block_cache import PromptIdentity
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import EngineSettings, TokenPrompt
from pointsman.state.engine_profiles import PROFILES
from pointsman_engine_sim.kv_transfer import KvTransfer
from pointsman_engine_sim.main import main
from pointsman_engine_sim.openai_bodies import FetchAnswer, FetchBody
from pointsman_engine_sim.server import EngineServer
from tests.support.engine_sim import EventReader, HeldBlocks, running_engine
from tests.support.waiting import eventually

CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
PROMPT = list(range(1000))
BODY = {"model": "pointsman-sim", "prompt": PROMPT, "max_tokens": 8}
PREFILL = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}
PROFILE = PROFILES["qwen2.5-7b-910b4"]


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[EngineServer, EngineServer]]:
    """Blocks are held for six seconds of the machine's."""
    told = {"kv_transfer_config": CONNECTOR, "kv_hold_seconds": 300.0} | settings
    async with running_engine(**told) as first, running_engine(**told) as second:
        yield first, second


async def post(engine: EngineServer, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.post(engine.url + path, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_fetched_prompt_gives_the_same_answer_and_is_let_go_where_it_was_computed() -> None:
    async with pair() as (prefills, decodes), EventReader(decodes) as events:
        _, alone = await post(prefills, BODY)
        _, place = await post(prefills, PREFILL)
        held = prefills.model.cache.blocks_held
        status, answer = await post(decodes, {**BODY, "kv_transfer_params": place["kv_transfer_params"]})
        blocks = HeldBlocks()
        blocks.apply(await events.replay())

        assert (status, answer["choices"]) == (200, alone["choices"])
        assert place["kv_transfer_params"]["do_remote_prefill"] is True
        assert (held, prefills.model.cache.blocks_held) == (62, 0)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert decodes.model.counts.prefix_cache_hits == 0
        assert list(blocks.tokens.values())[:62] == [tuple(PROMPT[n * 16 : n * 16 + 16]) for n in range(62)]


async def test_blocks_that_nobody_fetches_in_time_are_let_go_and_who_comes_later_fails() -> None:
    async with pair(kv_hold_seconds=1.0) as (prefills, decodes):
        _, place = await post(prefills, PREFILL)
        await eventually(lambda: prefills.model.cache.blocks_held == 0)

        status, answer = await post(decodes, {**BODY, "kv_transfer_params": place["kv_transfer_params"]})
        assert status == 500
        assert "not held" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 1}),
        ("/v1/responses", {"input": "word " * 100, "max_output_tokens": 1}),
    ],
)
async def test_blocks_of_every_route_are_held_and_let_go_in_time(path: str, prompt: dict[str, Any]) -> None:
    async with running_engine(kv_transfer_config=CONNECTOR, kv_hold_seconds=30.0) as engine:
        body = {"model": "pointsman-sim", **prompt, "kv_transfer_params": PREFILL["kv_transfer_params"]}
        assert (await post(engine, body, path))[0] == 200
        assert engine.model.cache.blocks_held > 0

        await eventually(lambda: engine.model.cache.blocks_held == 0)


async def test_an_engine_that_is_gone_hands_nothing_over() -> None:
    async with running_engine(kv_transfer_config=CONNECTOR) as decodes:
        async with running_engine(kv_transfer_config=CONNECTOR) as prefills:
            _, place = await post(prefills, PREFILL)

        assert (await post(decodes, {**BODY, "kv_transfer_params": place["kv_transfer_params"]}))[0] == 500


async def test_a_transfer_takes_its_bytes_over_the_bandwidth_less_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[Tokens] = []
    give = KvTransfer.give

    def noted(transfer: KvTransfer, body: FetchBody) -> FetchAnswer | None:
        tokens.extend([] if body.done else [body.tokens])
        return give(transfer, body)

    monkeypatch.setattr(KvTransfer, "give", noted)
    seconds = len(PROMPT) * PROFILE.kv_bytes_per_token / 0.002e9
    async with pair(kv_transfer_gb_per_s=0.002) as (prefills, decodes):
        loop = asyncio.get_running_loop()
        _, place = await post(prefills, PREFILL)
        before = loop.time()
        await post(decodes, {**BODY, "kv_transfer_params": place["kv_transfer_params"]})
        whole = loop.time() - before
        _, again = await post(prefills, PREFILL)
        await post(decodes, {**BODY, "kv_transfer_params": again["kv_transfer_params"]})

        assert whole >= seconds / 50  # the engines' speed
        assert tokens == [len(PROMPT), len(PROMPT) % 16]  # the whole blocks are here by then


async def test_without_a_connector_the_parameters_mean_nothing() -> None:
    async with running_engine() as engine:
        status, answer = await post(engine, PREFILL)

        assert (status, answer["kv_transfer_params"]) == (200, None)
        assert engine.model.cache.blocks_held == 0


def test_what_was_received_is_computed_after_all_once_the_request_was_preempted() -> None:
    model = EngineModel(PROFILE, EngineSettings(block_size=16, num_gpu_blocks=20, max_num_seqs=4))
    for number in range(2):
        prompt = TokenPrompt(range(number * 1000, number * 1000 + 128), lambda a, b: range(a, b), PromptIdentity())
        model.submit(RequestId(f"r{number}"), prompt, max_tokens=64, now=0.0, received=128)
    prefilled: list[int] = []
    now, ends = 0.0, 0
    while ends < 2:
        step = model.begin_step(now)
        assert step is not None
        prefilled.append(step.prefill_tokens)
        now = step.ends_at
        ends += len(model.end_step(now).finished)

    assert prefilled[0] == 2  # the last token of each
    assert model.counts.preemptions > 0
    assert max(prefilled[1:]) > 16


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--kv-transfer-config", "{}"),
        ("--kv-transfer-config", "no"),
        ("--kv-hold-seconds", "0"),
        ("--kv-transfer-gb-per-s", "0"),
    ],
)
def test_settings_with_which_nothing_could_be_handed_over_are_refused(option: str, value: str) -> None:
    refused = CliRunner().invoke(main, [option, value])

    assert refused.exit_code == 2
    assert option in refused.stderr
