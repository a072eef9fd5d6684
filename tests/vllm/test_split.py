"""Prefill at one real engine, decode at another: the KV cache is handed over, and the answer is that of a single engine.

Twice, with what runs on a CPU: NIXL over TCP, which is vLLM's own way and speaks `kv_transfer_params`, and vLLM's example
connector over a shared directory, which finds KV caches by their prompts and says nothing. NIXL comes from PyPI into a
directory beside the engines' environment; where it cannot be had its part is skipped.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksStored
from pointsman.contracts.decisions import RequestHandedOver, RequestPlaced
from pointsman.contracts.requests import PrefillFinished, RequestFinished
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import verify
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support import vllm
from tests.support.kv_connectors import packages_in
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine
from tests.support.waiting import eventually

NIXL_PACKAGES = ("nixl==1.5.1", "nixl-cu12==1.5.1")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FETCHED = "vllm:external_prefix_cache_hits_total"
"""Tokens that an engine had from its connector."""

# The example connector does not find a prompt whose length is one more than whole blocks: that is 193 of these tokens.
TEXT = "The history of the lighthouse at the mouth of the river begins with a storm. " * 12
LONG = {"model": SERVED_MODEL, "prompt": TEXT + "What happened", "max_tokens": 10, "temperature": 0}
TALK = {
    "model": SERVED_MODEL,
    "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "What does it begin with?"}],
    "max_tokens": 10,
    "temperature": 0,
}

Pair = tuple[SplitFleet, RunningEngine, RunningEngine]


@contextmanager
def connected_engines(
    home: EngineHome, directory: Path, connectors: Sequence[dict[str, Any]], environment: Sequence[dict[str, str]]
) -> Iterator[list[RunningEngine]]:
    """Engines with these connectors, booted side by side."""
    count = len(connectors)
    with ThreadPoolExecutor(count) as booting, ExitStack() as stack:  # an engine ends with the thread that started it

        def boot(number: int) -> RunningEngine:
            place = directory / f"engine-{number}"
            place.mkdir()
            flags = ("--kv-transfer-config", json.dumps(connectors[number]))
            return stack.enter_context(vllm.booted(home, *flags, directory=place, environment=environment[number]))

        yield list(booting.map(boot, range(count)))


@contextmanager
def nixl_engines(
    home: EngineHome, directory: Path, *, roles: Sequence[str] = ("kv_producer", "kv_consumer")
) -> Iterator[list[RunningEngine]]:
    connectors = [{"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"} for role in roles]
    environment = [
        {
            "PYTHONPATH": str(packages_in(home, "nixl", NIXL_PACKAGES, "nixl._api")),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "UCX_TLS": "tcp,self,sm",
        }
        for port in free_ports(len(roles))
    ]
    with connected_engines(home, directory, connectors, environment) as engines:
        yield engines


@contextmanager
def shared_storage_pair(home: EngineHome, directory: Path) -> Iterator[list[RunningEngine]]:
    storage = {"shared_storage_path": str(directory / "storage")}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": storage}
    with connected_engines(home, directory, [connector] * 2, [{}, {}]) as engines:
        yield engines


@pytest.fixture(scope="module", params=[nixl_engines, shared_storage_pair])
def engines(
    request: pytest.FixtureRequest, vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    """One pair after the other, since two engines are all that two cores can bear."""
    with request.param(vllm_home, tmp_path_factory.mktemp("pair")) as (prefills, decodes):
        yield prefills, decodes


@pytest.fixture
async def fleet(engines: tuple[RunningEngine, RunningEngine], vllm_home: EngineHome) -> AsyncIterator[Pair]:
    """A fleet in front of a pair of engines: who prefills, and who decodes."""
    prefills, decodes = engines
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, {"role": name, "engine_model": "smollm2-135m-cpu"})
        for name, engine in (("prefill", prefills), ("decode", decodes))
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened, prefills, decodes


async def test_the_answer_is_that_of_one_engine_and_its_prompt_was_fetched(fleet: Pair) -> None:
    whole, prefills, decodes = fleet
    fetched = decodes.metric(FETCHED)
    for number, (path, body) in enumerate([(COMPLETIONS, LONG), (CHAT, TALK)]):
        headers, answer = await whole.ask(path, f"whole-{number}", body)
        alone = await asyncio.to_thread(prefills.ask, path, body)
        prompt = answer["usage"]["prompt_tokens"]

        assert (headers["x-pointsman-prefill-instance"], headers["x-pointsman-instance"]) == ("prefill", "decode")
        assert _said(answer) == _said(alone) != ""
        assert decodes.metric(FETCHED) - fetched >= prompt - 1 - BLOCK_TOKENS
        fetched = decodes.metric(FETCHED)


async def test_what_was_handed_over_is_known_at_both_and_the_log_tells_it_all(
    fleet: Pair, unlike_any_other: str
) -> None:
    whole, prefills, _ = fleet
    body = LONG | {"prompt": unlike_any_other + TEXT}
    _, streamed = await whole.ask(COMPLETIONS, "r", body | {"stream": True})
    alone = await asyncio.to_thread(prefills.ask, COMPLETIONS, body)
    assert "".join(_said(event) for event in _events(streamed)) == _said(alone)

    index = whole.scheduler.state.index
    life = await whole.life_of("r")
    placed = next(event for event in life if isinstance(event, RequestPlaced))
    blocks = -(-placed.uncached_tokens // BLOCK_TOKENS) - 1

    await eventually(
        lambda: min(index.blocks(InstanceId(name)) for name in ("prefill", "decode")) >= blocks, seconds=20.0
    )
    entries = await whole.pool.entries()
    stored = {
        event.instance: len(unpack_keys(run.keys))
        for event in (entry.event for entry in entries)
        if isinstance(event, BlocksStored)
        for run in event.runs
    }
    kinds = [type(event) for event in life]
    verdict = verify(entries)

    assert set(stored) == {"prefill", "decode"}
    assert kinds[-3:] == [RequestHandedOver, PrefillFinished, RequestFinished]
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])


def _said(answer: dict[str, Any]) -> str:
    """The text of an answer, or of one event of a stream."""
    if not answer["choices"]:
        return ""
    choice = answer["choices"][0]
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


def _events(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]
