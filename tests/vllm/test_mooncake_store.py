"""Two real engines that share Mooncake's store, over TCP: what the first computed is a hit at the second, which loads it from
the store and was predicted to. See `plugins/mooncake_on_a_cpu.py` for what is not vLLM's own.

Mooncake comes from PyPI into a directory beside the engines' environment and needs libibverbs of the system; where it
cannot be had, this is skipped.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.child_process import die_with_parent
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.decisions import RequestPlaced, TierTokens
from pointsman.contracts.requests import RequestFinished
from pointsman.simulation.replay import verify
from pointsman.state.slower_tiers import STORE
from pointsman_cli.vllm_cpu.home import SERVED_MODEL, EngineHome
from tests.support.split_fleet import EnginePlace, SplitFleet, split_fleet
from tests.support.vllm import BLOCK_TOKENS, RunningEngine, fetched
from tests.support.waiting import eventually
from tests.vllm.test_split import FETCHED, connected_engines

PLUGINS = Path(__file__).parent / "plugins"
PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
INSTALL_SECONDS_MAX, START_SECONDS_MAX = 300, 60
STORE_BYTES, BUFFER_BYTES = 256 << 20, 64 << 20
TEXT = "The history of the lighthouse at the mouth of the river begins with a storm. " * 40

HIT_TOKENS_MIN = 500
CONNECTOR = {
    "kv_connector": "MooncakeStoreOnACpu",
    "kv_connector_module_path": "mooncake_on_a_cpu",
    "kv_role": "kv_both",
}

Pair = tuple[RunningEngine, RunningEngine]


@pytest.fixture(scope="module")
def engines(vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("mooncake")
    place = mooncake_of(vllm_home)
    with (
        store(place, directory) as environment,
        connected_engines(vllm_home, directory, [CONNECTOR] * 2, [environment] * 2) as (first, second),
    ):
        yield first, second


@pytest.fixture
async def fleet(engines: Pair, vllm_home: EngineHome) -> AsyncIterator[SplitFleet]:
    told = {"shared_kv_store": True, "engine_model": "smollm2-135m-cpu"}
    places = {
        name: EnginePlace(engine.url, engine.kv, engine.replay, told)
        for name, engine in zip(("first", "second"), engines, strict=True)
    }
    async with split_fleet(places, block_tokens=BLOCK_TOKENS, tokenizer=str(vllm_home.model)) as opened:
        yield opened


async def test_the_second_engine_loads_what_the_first_has_stored(
    fleet: SplitFleet, engines: Pair, unlike_any_other: str, tell_what_was_measured: Callable[[str], None]
) -> None:
    first, second = engines
    asked: dict[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": unlike_any_other + TEXT,
        "max_tokens": 10,
        "temperature": 0,
    }
    alone = await asyncio.to_thread(first.ask, "/v1/completions", asked)
    slower = fleet.scheduler.state.slower
    await eventually(lambda: slower.blocks("external", STORE) * BLOCK_TOKENS > HIT_TOKENS_MIN, seconds=60.0)
    await fleet.drain("first")
    loaded = second.metric(FETCHED)

    headers, answer = await fleet.ask("/v1/completions", "r", asked)
    life = await fleet.life_of("r")
    placed = next(event for event in life if isinstance(event, RequestPlaced))
    finished = next(event for event in life if isinstance(event, RequestFinished))
    verdict = verify(await fleet.entries())
    tell_what_was_measured(
        f"Mooncake's store: {finished.cached_tokens} tokens loaded, TTFT {finished.ttft:.2f} s; {placed.loads}"
    )

    assert headers["x-pointsman-instance"] == "second"
    assert answer["choices"][0] == alone["choices"][0]
    assert placed.loads == [TierTokens("external", finished.cached_tokens or 0)]
    assert finished.cached_tokens == finished.predicted_cached_tokens
    assert second.metric(FETCHED) - loaded == finished.cached_tokens > HIT_TOKENS_MIN
    assert (verdict.different, verdict.unchecked.total(), verdict.problems) == (0, 0, [])


def mooncake_of(home: EngineHome) -> Path:
    """A directory to import Mooncake from. Skips where it cannot be had, or does not load."""
    place, python = home.directory / "mooncake", str(home.python)
    if not (place / "mooncake").exists():
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), PACKAGE]
        made = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
        if made.returncode:
            pytest.skip(f"Mooncake cannot be installed: {made.stderr.strip().splitlines()[-1:]}")
    load, told = [python, "-c", "import mooncake.store"], os.environ | {"PYTHONPATH": str(place)}
    loaded = subprocess.run(load, capture_output=True, text=True, env=told, check=False)
    if loaded.returncode:
        pytest.skip(f"Mooncake does not load: {loaded.stderr.strip().splitlines()[-1:]}")
    return place


@contextmanager
def store(place: Path, directory: Path) -> Iterator[dict[str, str]]:
    """A store over TCP, to which every engine with this environment adds memory."""
    with _master(place, directory / "master.log") as (master, metadata):
        told = {
            "metadata_server": f"http://{metadata}/metadata",
            "master_server_address": master,
            "protocol": "tcp",
            "global_segment_size": STORE_BYTES,
            "local_buffer_size": BUFFER_BYTES,
        }
        (directory / "mooncake.json").write_text(json.dumps(told))
        yield {
            "PYTHONPATH": f"{place}{os.pathsep}{PLUGINS}",
            "MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json"),
            "PYTHONHASHSEED": "0",
            "VLLM_HOST_IP": "127.0.0.1",
        }


@contextmanager
def _master(place: Path, log: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a master that runs, and of its metadata server."""
    rpc, metrics, metadata = free_ports(3)
    told = {
        "rpc_port": rpc,
        "metrics_port": metrics,
        "enable_http_metadata_server": "true",
        "http_metadata_server_host": "127.0.0.1",
        "http_metadata_server_port": metadata,
    }
    program = place / "mooncake" / "mooncake_master"
    program.chmod(0o755)
    command = [str(program), *(f"--{name}={value}" for name, value in told.items())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=die_with_parent(signal.SIGTERM))
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while not _answers(f"http://127.0.0.1:{metrics}/metrics"):
                assert process.poll() is None, f"the master ended:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"the master does not answer:\n{log.read_text()}"
                time.sleep(0.2)
            yield f"127.0.0.1:{rpc}", f"127.0.0.1:{metadata}"
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        fetched(url)
    except OSError:
        return False
    return True
