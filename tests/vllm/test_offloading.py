"""A real engine with vLLM's OffloadingConnector, whose host memory holds more than its device: what the device evicted is
still a hit, is loaded back, and was predicted so. See `plugins/host_memory.py` for what is not vLLM's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.contracts.cache import BlocksRemoved, BlocksStored
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import InstanceReported
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.offloading import (
    PROMPT_TOKENS,
    log_of_prompts_asked_twice,
    second_round,
    what_was_measured,
)
from tests.support.vllm import BLOCK_TOKENS

PLUGINS = Path(__file__).parent / "plugins"
HOST_BYTES = 256 << 20
PROMPTS = 4
"""Together more than the device holds, and less than the host."""


@pytest.mark.parametrize("self_describing", [False, True])
async def test_a_prompt_that_the_device_evicted_is_loaded_back_and_was_predicted_so(
    vllm_home: EngineHome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell_what_was_measured: Callable[[str], None],
    self_describing: bool,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    events = await log_of_prompts_asked_twice(
        tmp_path, f"--kv-transfer-config '{json.dumps(connector(self_describing=self_describing))}'", prompts=PROMPTS
    )
    tell_what_was_measured(f"OffloadingConnector: {what_was_measured(events, prompts=PROMPTS)}")

    assert second_round(events, prompts=PROMPTS) == [(PROMPT_TOKENS,) * 3] * PROMPTS
    prices = [event.load_seconds for event in events if isinstance(event, RequestPlaced) and event.loads]
    assert len(set(prices)) > 1, "the speed of loading is learned"
    assert any(isinstance(event, BlocksStored) and event.tier == "host" for event in events)
    assert any(isinstance(event, BlocksRemoved) and event.tier == "device" for event in events)
    (host,) = [event for event in events if isinstance(event, InstanceReported)][-1].tiers
    assert (host.tier, host.blocks >= PROMPTS * PROMPT_TOKENS // BLOCK_TOKENS) == ("host", True)


def connector(*, self_describing: bool) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemorySpec",
            "spec_module_path": "host_memory",
            "cpu_bytes_to_use": HOST_BYTES,
            "self_describing_kv_events": self_describing,
        },
    }
