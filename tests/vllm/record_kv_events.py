"""Writes `tests/golden/kv_events/NAME.json`: what a real engine with a connector said on its KV event socket, and how much of
each prompt it then had. `.venv/bin/python -m tests.vllm.record_kv_events lmcache` takes some minutes; other names: offloading,
offloading_described, mooncake_store."""

import base64
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import zmq

from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome, default_directory
from tests.support.kv_connectors import (
    LMCACHE_PACKAGES,
    MOONCAKE_PACKAGES,
    MakeConnector,
    host_memory,
    lmcache,
    mooncake_store,
)
from tests.support.vllm import BLOCK_TOKENS, RunningEngine, booted

GOLDEN = Path(__file__).parents[1] / "golden" / "kv_events"
PROMPT_TOKENS, PROMPTS = 193, 6
ASKED = (0, 1, 2, 0, 1, 3, 4, 5, 0, 5, 4)
DEVICE_BLOCKS, SERVER_GB = 20, 0.02
"""The device holds two of the prompts, LMCache's server three."""
MODEL_LEN_MAX = DEVICE_BLOCKS * BLOCK_TOKENS // 2
SETTLE_SECONDS = 1.5
CONNECTORS: dict[str, MakeConnector] = {
    "offloading": host_memory,
    "offloading_described": partial(host_memory, self_describing=True),
    "lmcache": partial(lmcache, size_gb=SERVER_GB),
    "mooncake_store": mooncake_store,
}
BESIDE = {"lmcache": LMCACHE_PACKAGES[:1], "mooncake_store": MOONCAKE_PACKAGES}


def record(name: str) -> None:
    home = EngineHome(default_directory().resolve())
    chance = Random(11)
    prompts = [[chance.randrange(100, 20_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as place, CONNECTORS[name](home, Path(place)) as (connector, environment):
        flags = [
            *("--kv-transfer-config", json.dumps(connector), "--enable-prompt-tokens-details"),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-model-len", str(MODEL_LEN_MAX)),
        ]
        with booted(home, *flags, directory=Path(place), environment=environment) as engine:
            steps = list(_steps(engine, prompts))
            version = engine.ask("/version")["version"]
    made = {
        "vllm": version,
        "beside": BESIDE.get(name, []),
        "connector": connector["kv_connector"],
        "prompts": prompts,
        "steps": steps,
    }
    (GOLDEN / f"{name}.json").write_text(json.dumps(made) + "\n")


def _steps(engine: RunningEngine, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Of each request: the batches that came before it, and how many of its tokens were cached."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(engine.kv)
        socket.subscribe(b"")
        time.sleep(SETTLE_SECONDS)
        for prompt in ASKED:
            batches = []
            while socket.poll(0):
                _, sequence, payload = socket.recv_multipart()
                batches.append([int.from_bytes(sequence, "big"), base64.b64encode(payload).decode()])
            body = {"model": SERVED_MODEL, "prompt": prompts[prompt], "max_tokens": 1, "temperature": 0}
            usage = engine.ask("/v1/completions", body)["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            yield {"batches": batches, "prompt": prompt, "cached_tokens": cached}
            time.sleep(SETTLE_SECONDS)


if __name__ == "__main__":
    record(sys.argv[1])
