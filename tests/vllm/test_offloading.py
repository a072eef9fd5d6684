"""A real engine with vLLM's OffloadingConnector, whose host memory holds more than its device: what the device evicted is
still a hit, is loaded back, and was predicted so. See `plugins/host_memory.py` for what is not vLLM's own."""

import asyncio
import json
from pathlib import Path
from random import Random

import aiohttp
import pytest

from pointsman.analysis.tier_shares import TierCounter
from pointsman.contracts.cache import BlocksRemoved, BlocksStored
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.requests import RequestFinished
from pointsman.ports import Link
from pointsman_cli.discovery import find_fleet
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.log_reading import events_in, link_to
from tests.support.up import pointsman_up
from tests.support.vllm import BLOCK_TOKENS, BOOT_SECONDS_MAX

PLUGINS = Path(__file__).parent / "plugins"
DEVICE_BLOCKS = 40
PROMPT_TOKENS = 512
HOST_BYTES = 256 << 20
PROMPTS = 4
"""Together more than the device holds, and less than the host."""
ROUNDS = 2
SETTLE_SECONDS = 1.0


@pytest.mark.parametrize("self_describing", [False, True])
async def test_a_prompt_that_the_device_evicted_is_loaded_back_and_was_predicted_so(
    vllm_home: EngineHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_describing: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemorySpec",
            "spec_module_path": "host_memory",
            "cpu_bytes_to_use": HOST_BYTES,
            "self_describing_kv_events": self_describing,
        },
    }
    arguments = f"--max-model-len 1024 --enable-prompt-tokens-details --kv-transfer-config '{json.dumps(connector)}'"
    told = ("--engine", "vllm", "--instances", "1", "--kv-blocks", str(DEVICE_BLOCKS), "--engine-args", arguments)
    chance = Random(7)
    prompts = [[chance.randrange(100, 20_000) for _ in range(PROMPT_TOKENS + 1)] for _ in range(PROMPTS)]
    with pointsman_up(tmp_path, *told) as up:
        up.wait_for("Stop +Ctrl-C", BOOT_SECONDS_MAX)
        fleet = find_fleet(data=up.data)
        async with link_to(fleet) as link:
            for _ in range(ROUNDS):
                for prompt in prompts:
                    await _ask(fleet.ingress, fleet.model, prompt)
                    await asyncio.sleep(SETTLE_SECONDS)
            await _check(link)
        up.stop()


async def _ask(url: str, model: str, prompt: list[int]) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers={"x-slo-ttft-ms": "600000"}) as answer,
    ):
        content = await answer.text()
        assert answer.status == 200, content


async def _check(link: Link) -> None:
    events = await events_in(link.log)
    placed = [event for event in events if isinstance(event, RequestPlaced)]
    ends = [event for event in events if isinstance(event, RequestFinished)]
    again = ends[PROMPTS:]
    tiers = TierCounter()
    for event in events:
        tiers.apply(event)
    print({"tokens": tiers.tokens, "computed": tiers.computed, "placed": [(p.loads, p.load_seconds) for p in placed]})
    print({"cached": [end.cached_tokens for end in ends], "ttft": [end.ttft for end in ends]})

    assert any(isinstance(event, BlocksStored) and event.tier == "host" for event in events)
    assert any(isinstance(event, BlocksRemoved) and event.tier == "device" for event in events)
    assert [end.cached_tokens for end in again] == [PROMPT_TOKENS] * PROMPTS
    assert [end.predicted_cached_tokens for end in again] == [PROMPT_TOKENS] * PROMPTS
    loaded = [sum(load.tokens for load in event.loads) for event in placed[PROMPTS:]]
    assert min(loaded) >= PROMPT_TOKENS // 2
    assert placed[-1].load_seconds != placed[PROMPTS].load_seconds, "the speed of loading is learned"
    reports = [event for event in events if isinstance(event, InstanceReported)]
    (host,) = reports[-1].tiers
    assert (host.tier, host.blocks >= PROMPTS * PROMPT_TOKENS // BLOCK_TOKENS) == ("host", True)
