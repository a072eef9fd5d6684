"""A real engine whose connector holds more than its device, in host memory by vLLM's OffloadingConnector or in LMCache's
server: what the device evicted is still a hit, is loaded back, and was predicted so; what the connector drops is gone."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored
from pointsman.contracts.decisions import RequestPlaced
from pointsman.primitives import BlockKey
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.kv_connectors import MakeConnector, host_memory, lmcache
from tests.support.offloading import (
    PROMPT_TOKENS,
    log_of_prompts_asked_twice,
    second_round,
    what_was_measured,
)

HOST_BYTES = 60 << 20
SERVER_GB = 0.07
"""Four prompts fit into either (12 MB each; LMCache drops chunks at 80%), six do not."""
PROMPTS, MORE = 4, 2
CONNECTORS = {
    "by hash": partial(host_memory, size=HOST_BYTES),
    "self-describing": partial(host_memory, self_describing=True, size=HOST_BYTES),
    "LMCache": partial(lmcache, size_gb=SERVER_GB),
}


@pytest.mark.parametrize("name", CONNECTORS)
async def test_a_prompt_that_the_device_evicted_is_loaded_back_and_was_predicted_so(
    vllm_home: EngineHome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell_what_was_measured: Callable[[str], None],
    name: str,
) -> None:
    make: MakeConnector = CONNECTORS[name]
    with make(vllm_home, tmp_path) as (connector, environment):
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        told = f"--kv-transfer-config '{json.dumps(connector)}'"
        events = await log_of_prompts_asked_twice(tmp_path, told, prompts=PROMPTS, more=MORE)
    tell_what_was_measured(f"{name}: {what_was_measured(events, prompts=PROMPTS)}")

    assert second_round(events, prompts=PROMPTS) == [(PROMPT_TOKENS,) * 3] * PROMPTS
    prices = [event.load_seconds for event in events if isinstance(event, RequestPlaced) and event.loads]
    assert len(set(prices)) > 1, "the speed of loading is learned"
    assert any(isinstance(event, BlocksStored) and event.tier == "host" for event in events)
    assert {event.tier for event in events if isinstance(event, BlocksRemoved)} == {"device", "host"}
    stored, held = set[BlockKey](), set[BlockKey]()
    for event in events:
        if isinstance(event, BlocksStored) and event.tier == "host":
            keys = [key for run in event.runs for key in unpack_keys(run.keys)]
            stored.update(keys)
            held.update(keys)
        elif isinstance(event, BlocksRemoved) and event.tier == "host":
            held.difference_update(unpack_keys(event.keys))
    assert 0 < len(held) < len(stored)
