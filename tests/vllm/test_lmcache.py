"""A real engine with LMCache: its server beside the engine holds more than the device, says what it holds and what it
dropped, and what the device evicted is loaded back from it. All of LMCache is its own, and runs on a CPU.

LMCache comes from PyPI into a directory beside the engines' environment, without what only accelerators need; where it
cannot be had, this is skipped.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.child_process import die_with_parent
from pointsman.adapters.tcp_ports import free_ports
from pointsman.contracts.cache import BlocksRemoved, BlocksStored
from pointsman.contracts.fleet import InstanceReported
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.offloading import (
    PROMPT_TOKENS,
    log_of_prompts_asked_twice,
    second_round,
    what_was_measured,
)
from tests.support.vllm import BLOCK_TOKENS, fetched

PACKAGES = (
    "lmcache==0.5.6",
    *("aiofile", "aiofiles", "caio", "nvtx", "redis", "sortedcontainers"),
    "opentelemetry-exporter-prometheus==0.60b1",
)
INSTALL_SECONDS_MAX, START_SECONDS_MAX = 300, 120
CHUNK_TOKENS = 2 * BLOCK_TOKENS
SERVER_GB = 0.07
"""Of which LMCache uses 80% before it drops chunks: four prompts fit (12 MB each), six do not."""
PROMPTS, MORE = 4, 2


async def test_a_prompt_that_the_device_evicted_is_loaded_back_from_lmcache_and_was_predicted_so(
    vllm_home: EngineHome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell_what_was_measured: Callable[[str], None],
) -> None:
    place = lmcache_of(vllm_home)
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    with server(vllm_home, tmp_path / "lmcache.log") as port:
        events = await log_of_prompts_asked_twice(
            tmp_path, f"--kv-transfer-config '{json.dumps(connector(port))}'", prompts=PROMPTS, more=MORE
        )
    tell_what_was_measured(f"LMCache: {what_was_measured(events, prompts=PROMPTS)}")

    assert second_round(events, prompts=PROMPTS) == [(PROMPT_TOKENS,) * 3] * PROMPTS
    assert any(isinstance(event, BlocksStored) and event.tier == "host" for event in events)
    assert any(isinstance(event, BlocksRemoved) and event.tier == "host" for event in events)
    (host,) = [event for event in events if isinstance(event, InstanceReported)][-1].tiers
    asked = (PROMPTS + MORE) * PROMPT_TOKENS // BLOCK_TOKENS
    assert (host.tier, 0 < host.blocks < asked) == ("host", True)


def connector(port: int) -> dict[str, Any]:
    """To the server at `port` of this machine, which is asked to do the copies: only then it tells of them."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }


def lmcache_of(home: EngineHome) -> Path:
    """A directory to import LMCache from. Skips where it cannot be had, or does not load."""
    place, python = home.directory / "lmcache", str(home.python)
    if not (place / "lmcache").exists():
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PACKAGES]
        made = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
        if made.returncode:
            pytest.skip(f"LMCache cannot be installed: {made.stderr.strip().splitlines()[-1:]}")
    load, told = [python, "-c", "import lmcache.v1.multiprocess.server"], os.environ | {"PYTHONPATH": str(place)}
    loaded = subprocess.run(load, capture_output=True, text=True, env=told, check=False)
    if loaded.returncode:
        pytest.skip(f"LMCache does not load: {loaded.stderr.strip().splitlines()[-1:]}")
    return place


@contextmanager
def server(home: EngineHome, log: Path, *, size_gb: float = SERVER_GB) -> Iterator[int]:
    """The port of an LMCache server that runs and reads the engines' caches by itself, as it does on a GPU."""
    port, http_port = free_ports(2)
    told = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http_port,
        "--chunk-size": CHUNK_TOKENS,
        "--l1-size-gb": size_gb,
        "--eviction-policy": "LRU",
    }
    command = [
        str(home.python),
        "-m",
        "lmcache.cli.main",
        "server",
        *(str(word) for pair in told.items() for word in pair),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=die_with_parent(signal.SIGTERM))
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while not _answers(f"http://127.0.0.1:{http_port}/healthcheck"):
                assert process.poll() is None, f"LMCache ended:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"LMCache does not answer:\n{log.read_text()}"
                time.sleep(0.5)
            yield port
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        fetched(url)
    except OSError:
        return False
    return True
