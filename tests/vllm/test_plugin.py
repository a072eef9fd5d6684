"""The engine-side plug-in in a real engine, beside the same engine without it: same outputs, better hits, fair shares.

Two engines, one after the other, are asked the same; `stock` and `plugged` are what they did. The plug-in is installed as
people do it, by pip, so its package and its entry point are tested as well. `-s` prints the numbers.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from pointsman.adapters.kv_events.events import EngineBatch, EngineBlockStored, EngineCacheCleared, EngineHash
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.vllm import RunningEngine

PACKAGE = Path(__file__).parents[2] / "shared" / "pointsman_vllm"

BLOCK = 32
BLOCKS = 26
"""One of them is vLLM's own."""
PROMPT_BLOCKS = 6
PROMPTS = 5
"""That come round in turn. Four of them fit, with a block for the output."""
ROUNDS = 6
FLOOD, LITTLE = 16, 4
QUIET_SECONDS = 3.0

FLAGS = (
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(BLOCK * 16)),
    *("--max-num-seqs", "2", "--enable-prompt-tokens-details", "--dtype", "float32"),
)
SETTINGS = {"EVICTION": "rlt", "SEED": "1", "QUANTUM_TOKENS": "128"}

BootEngine = Callable[..., AbstractContextManager[RunningEngine]]


@dataclass(frozen=True)
class Findings:
    """What one engine did."""

    alone: list[str]
    """Answers of requests that came one by one."""
    hit_rate: float
    """Of prompts in turn."""
    crowd: "list[Answer]"
    """To requests that came at once: those of `f`, which floods, then of `l`, which sends little."""
    batches: list[EngineBatch]
    log: str


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in, installed where nothing else is."""
    target = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, PACKAGE], check=True)
    return target


@pytest.fixture(scope="module")
def stock(boot_engine: BootEngine) -> Findings:
    with boot_engine(*FLAGS) as engine:
        return findings(engine)


@pytest.fixture(scope="module")
def plugged(boot_engine: BootEngine, installed: Path) -> Findings:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(installed))
        for name, value in SETTINGS.items():
            environment.setenv(f"POINTSMAN_VLLM_{name}", value)
        with boot_engine(*FLAGS, "--scheduler-cls", "pointsman_vllm.dlpm.DlpmScheduler") as engine:
            return findings(engine)


def test_the_outputs_are_those_of_stock_vllm(stock: Findings, plugged: Findings) -> None:
    assert plugged.alone == stock.alone
    assert [answer.text for answer in plugged.crowd] == [answer.text for answer in stock.crowd]


def test_prompts_that_come_round_in_turn_hit_with_randomised_eviction_where_lru_never_does(
    stock: Findings, plugged: Findings
) -> None:
    print(
        f"hit rate of {PROMPTS} prompts in turn, {PROMPTS - 1} fit: lru {stock.hit_rate:.2f}, rlt {plugged.hit_rate:.2f}"
    )

    assert stock.hit_rate == 0
    assert plugged.hit_rate > 0.25


def test_who_sends_little_is_not_kept_waiting_by_who_floods(stock: Findings, plugged: Findings) -> None:
    for name, found in (("fcfs", stock), ("dlpm", plugged)):
        ends = "".join(answer.client for answer in sorted(found.crowd, key=lambda answer: answer.ended))
        waits = fmean(answer.seconds for answer in found.crowd if answer.client == "l")
        print(f"{name}: ends {ends}, share of l {share_of_little(found):.2f}, its mean time {waits:.1f} s")

    assert share_of_little(stock) < 0.3
    assert share_of_little(plugged) > 0.35


@pytest.mark.parametrize("engine", ["stock", "plugged"])
def test_kv_events_tell_a_tree_that_fits_the_cache(engine: str, request: pytest.FixtureRequest) -> None:
    found: Findings = request.getfixturevalue(engine)
    parents: dict[EngineHash, EngineHash | None] = {}
    copies: Counter[EngineHash] = Counter()
    removed = 0
    for event in (event for batch in found.batches for event in batch.events):
        assert not isinstance(event, EngineCacheCleared)
        if isinstance(event, EngineBlockStored):
            chain = [event.parent_block_hash, *event.block_hashes]
            parents.update(zip(event.block_hashes, chain, strict=False))
            copies.update(event.block_hashes)
        else:
            removed += len(event.block_hashes)
            copies.subtract(event.block_hashes)
        assert min(copies.values()) >= 0, "removed what was not there"
        assert copies.total() < BLOCKS
        held = {block for block, count in copies.items() if count}
        assert all(parents[block] is None or parents[block] in held for block in held), "an inner block was evicted"

    assert removed > BLOCKS


def test_the_engine_says_what_it_was_given(stock: Findings, plugged: Findings) -> None:
    assert "randomised leaf token, seed 1" in plugged.log
    assert "deficit longest prefix match, FairnessSettings(quantum_tokens=128.0" in plugged.log
    assert "randomised" not in stock.log


@pytest.mark.parametrize("part", ["block_pool", "scheduler", "other_attention"])
def test_classes_of_vllm_keep_their_word_under_whatever_happens(
    part: str, vllm_home: EngineHome, installed: Path
) -> None:
    """Thousands of random steps of vLLM's own classes with the plug-in in them, without a model."""
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "POINTSMAN_VLLM_EVICTION": "rlt"}
    program = Path(__file__).with_name("classes_without_a_model.py")
    run = subprocess.run(
        [vllm_home.python, program, part, vllm_home.model], env=environment, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [("EVICTION", "fifo", "must be lru or rlt, not 'fifo'"), ("SEED", "x", "must be a whole number, not 'x'")],
)
def test_a_setting_that_does_not_fit_ends_the_engine_at_once(
    setting: str, value: str, said: str, vllm_home: EngineHome, installed: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed), f"POINTSMAN_VLLM_{setting}": value}
    load = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    run = subprocess.run([vllm_home.python, "-c", load], env=environment, capture_output=True, text=True, check=False)

    assert run.returncode != 0
    assert said in run.stderr


def findings(engine: RunningEngine) -> Findings:
    """Ask one engine everything: one by one, then round in turn, then all at once."""
    chance = Random(1)
    prompts = [random_prompt(chance) for _ in range(PROMPTS)]
    alone = [ask(engine, prompt, output_tokens=8).text for prompt in prompts]
    in_turn = [ask(engine, prompt, output_tokens=1) for _ in range(ROUNDS) for prompt in prompts]
    return Findings(
        alone=alone,
        hit_rate=sum(answer.cached_tokens for answer in in_turn) / sum(len(prompt) for prompt in prompts * ROUNDS),
        crowd=asked_at_once(engine, chance),
        batches=asyncio.run(events_so_far(engine)),
        log=engine.log.read_text(errors="replace"),
    )


@dataclass(frozen=True)
class Answer:
    """What came back, to whom and when."""

    client: str
    text: str
    cached_tokens: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def ask(engine: RunningEngine, prompt: Sequence[int], *, output_tokens: int, client: str = "") -> Answer:
    """Greedy, and as long as was asked."""
    began = time.monotonic()
    body = {
        "model": "smollm2-135m",
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    got = engine.ask("/v1/completions", body | {"vllm_xargs": {"pointsman_client": client}})
    cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(client, got["choices"][0]["text"], cached, began, time.monotonic())


def asked_at_once(engine: RunningEngine, chance: Random) -> list[Answer]:
    """The one who floods comes first, with all that it has; the other when the engine is busy with that."""
    with ThreadPoolExecutor(FLOOD + LITTLE) as threads:
        flood = [threads.submit(ask, engine, random_prompt(chance), output_tokens=4, client="f") for _ in range(FLOOD)]
        while engine.metric("vllm:num_requests_waiting") < FLOOD - 4:
            time.sleep(0.05)
        little = [
            threads.submit(ask, engine, random_prompt(chance), output_tokens=4, client="l") for _ in range(LITTLE)
        ]
        return [future.result() for future in (*flood, *little)]


def random_prompt(chance: Random) -> list[int]:
    return [chance.randrange(100, 40_000) for _ in range(PROMPT_BLOCKS * BLOCK + 1)]


def share_of_little(found: Findings) -> float:
    """While the client that sends little had something waiting or running: its part of the requests, all alike, that ended."""
    little = [answer for answer in found.crowd if answer.client == "l"]
    first, last = min(answer.began for answer in little), max(answer.ended for answer in little)
    return len(little) / sum(first < answer.ended <= last for answer in found.crowd)


async def events_so_far(engine: RunningEngine) -> list[EngineBatch]:
    """All batches since the engine's start, from its replay socket."""
    found = []
    async with aclosing(KvEventReader(KvEndpoint(engine.kv, engine.replay)).items()) as items:
        with contextlib.suppress(TimeoutError):
            while True:
                item = await asyncio.wait_for(anext(items), QUIET_SECONDS)
                if isinstance(item, EngineBatch):
                    found.append(item)
    assert found[0].sequence == 0
    return found
