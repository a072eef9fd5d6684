"""What real engines with vLLM's OffloadingConnector, LMCache and Mooncake's store said of their caches, byte for byte, and how
much of each prompt they had: the worker's view of the bytes foretells it. The files tell the versions; they are made by
`tests/vllm/record_kv_events.py`."""

import base64
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.kv_events.codec import decode_batch
from pointsman.contracts.block_keys import KeyChain
from pointsman_worker.tiers import CacheTranslator

BLOCK_TOKENS = 32
CHAIN = KeyChain(secret=b"secret", model="m", block_tokens=BLOCK_TOKENS)
FILES = sorted((Path(__file__).parent / "kv_events").glob("*.json"))
TIER_OF = {"mooncake_store": "external"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_the_engine_had_of_each_prompt_is_what_its_events_had_told(file: Path) -> None:
    recorded: dict[str, Any] = json.loads(file.read_text())
    tier = TIER_OF.get(file.stem, "host")
    translator = CacheTranslator(CHAIN, BLOCK_TOKENS, shared_store=tier == "external")
    foretold, beyond_the_device = [], 0
    for step in recorded["steps"]:
        for sequence, payload in step["batches"]:
            batch = decode_batch(sequence, base64.b64decode(payload))
            assert (batch.undecodable, batch.unknown, batch.problem) == (0, 0, "")
            for event in batch.events:
                translator.apply(event)
        keys = CHAIN.extend(CHAIN.root(), recorded["prompts"][step["prompt"]])
        slower = translator.slower.get(tier)  # type: ignore[call-overload]
        below = slower.keys.parents if slower is not None else {}
        device = len(list(takewhile(lambda key: key in translator.device.keys.parents, keys)))
        loaded = len(list(takewhile(lambda key, below=below: key in below, keys[device:])))  # type: ignore[misc]
        foretold.append((device + loaded) * BLOCK_TOKENS)
        beyond_the_device += loaded

    assert foretold == [step["cached_tokens"] for step in recorded["steps"]]
    assert beyond_the_device > 0
    assert translator.device.counters.mismatches == 0
