"""Writes `tests/golden/kv_events/NAME.json`: what a real engine with a connector said on its KV event socket, and how much of
each prompt it then had. `.venv/bin/python -m tests.vllm.record_kv_events lmcache` takes some minutes; other names: offloading,
offloading_described, mooncake_store."""

import base64
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import zmq

from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome, default_directory
from tests.support.vllm import BLOCK_TOKENS, RunningEngine, booted
from tests.vllm import test_lmcache, test_mooncake_store, test_offloading

GOLDEN = Path(__file__).parents[1] / "golden" / "kv_events"
PROMPT_TOKENS, PROMPTS = 193, 6
ASKED = (0, 1, 2, 0, 1, 3, 4, 5, 0, 5, 4)
"""The device holds two of the prompts, LMCache's server three."""
DEVICE_BLOCKS, SERVER_GB = 20, 0.02
SETTLE_SECONDS = 1.5


@contextmanager
def _offloading(home: EngineHome, directory: Path, *, described: bool = False) -> Iterator[tuple[Any, dict[str, str]]]:
    yield test_offloading.connector(self_describing=described), {"PYTHONPATH": str(test_offloading.PLUGINS)}


@contextmanager
def _described(home: EngineHome, directory: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    with _offloading(home, directory, described=True) as made:
        yield made


@contextmanager
def _lmcache(home: EngineHome, directory: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    place = test_lmcache.lmcache_of(home)
    with test_lmcache.server(home, directory / "lmcache.log", size_gb=SERVER_GB) as port:
        yield test_lmcache.connector(port), {"PYTHONPATH": str(place)}


@contextmanager
def _mooncake(home: EngineHome, directory: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    place = test_mooncake_store.mooncake_of(home)
    with test_mooncake_store.store(place, directory) as environment:
        yield test_mooncake_store.CONNECTOR, environment


CONNECTORS = {
    "offloading": _offloading,
    "offloading_described": _described,
    "lmcache": _lmcache,
    "mooncake_store": _mooncake,
}


def record(name: str) -> None:
    home = EngineHome(default_directory().resolve())
    chance = Random(11)
    prompts = [[chance.randrange(100, 20_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as place, CONNECTORS[name](home, Path(place)) as (connector, environment):
        flags = [
            *("--kv-transfer-config", json.dumps(connector), "--enable-prompt-tokens-details"),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-model-len", str(DEVICE_BLOCKS * BLOCK_TOKENS)),
        ]
        with booted(home, *flags, directory=Path(place), environment=environment) as engine:
            steps = list(_steps(engine, prompts))
            version = engine.ask("/version")["version"]
    made = {"vllm": version, "connector": connector["kv_connector"], "prompts": prompts, "steps": steps}
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
