"""KV connectors of real engines that keep blocks beyond the device, with what they need beside the engine: each is a context
manager that gives what `--kv-transfer-config` says and the engine's environment.

What is not vLLM's own comes from PyPI into directories beside the engines' environment, without what only accelerators
need; where it cannot be had, tests are skipped.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pointsman.adapters.child_process import die_with_parent
from pointsman.adapters.tcp_ports import free_ports
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.vllm import BLOCK_TOKENS, fetched

PLUGINS = Path(__file__).parents[1] / "vllm" / "plugins"
LMCACHE_PACKAGES = (
    "lmcache==0.5.6",
    *("aiofile", "aiofiles", "caio", "nvtx", "redis", "sortedcontainers"),
    "opentelemetry-exporter-prometheus==0.60b1",
)
MOONCAKE_PACKAGES = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
"""Needs libibverbs of the system."""
INSTALL_SECONDS_MAX, START_SECONDS_MAX = 300, 120
CHUNK_TOKENS = 2 * BLOCK_TOKENS
"""LMCache's blocks."""
STORE_BYTES, BUFFER_BYTES = 256 << 20, 64 << 20

Connector = AbstractContextManager[tuple[dict[str, Any], dict[str, str]]]
MakeConnector = Callable[[EngineHome, Path], Connector]


def packages_in(home: EngineHome, name: str, packages: Sequence[str], module: str) -> Path:
    """A directory to import `module` from. Skips where the packages cannot be had, or do not load."""
    place, python = home.directory / name, str(home.python)
    if not (place / name).exists():
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *packages]
        made = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
        if made.returncode:
            pytest.skip(f"{name} cannot be installed: {made.stderr.strip().splitlines()[-1:]}")
    load, told = [python, "-c", f"import {module}"], os.environ | {"PYTHONPATH": str(place)}
    loaded = subprocess.run(load, capture_output=True, text=True, env=told, check=False)
    if loaded.returncode:
        pytest.skip(f"{name} does not load: {loaded.stderr.strip().splitlines()[-1:]}")
    return place


@contextmanager
def host_memory(
    home: EngineHome, directory: Path, *, self_describing: bool = False, size: int = 256 << 20
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """vLLM's OffloadingConnector, with `size` bytes. See `plugins/host_memory.py` for what is not vLLM's own."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemorySpec",
            "spec_module_path": "host_memory",
            "cpu_bytes_to_use": size,
            "self_describing_kv_events": self_describing,
        },
    }
    yield connector, {"PYTHONPATH": str(PLUGINS)}


@contextmanager
def lmcache(
    home: EngineHome, directory: Path, *, size_gb: float = 1.0
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """LMCache's server, with that much memory, of which it uses 80% before it drops chunks. The server does the copies, as
    on a GPU: only then it tells of them."""
    place = packages_in(home, "lmcache", LMCACHE_PACKAGES, "lmcache.v1.multiprocess.server")
    environment = {"PYTHONPATH": str(place), "LMCACHE_TRACK_USAGE": "false"}
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
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    log, sign_of_life = directory / "lmcache.log", f"http://127.0.0.1:{http_port}/healthcheck"
    with _process(command, environment, log, sign_of_life):
        yield connector, environment


@contextmanager
def mooncake_store(home: EngineHome, directory: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Mooncake's store over TCP, to which every engine adds memory. See `plugins/mooncake_on_a_cpu.py` for what is not
    vLLM's own."""
    place = packages_in(home, "mooncake", MOONCAKE_PACKAGES, "mooncake.store")
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
    config = {
        "metadata_server": f"http://127.0.0.1:{metadata}/metadata",
        "master_server_address": f"127.0.0.1:{rpc}",
        "protocol": "tcp",
        "global_segment_size": STORE_BYTES,
        "local_buffer_size": BUFFER_BYTES,
    }
    (directory / "mooncake.json").write_text(json.dumps(config))
    connector = {
        "kv_connector": "MooncakeStoreOnACpu",
        "kv_connector_module_path": "mooncake_on_a_cpu",
        "kv_role": "kv_both",
    }
    environment = {
        "PYTHONPATH": f"{place}{os.pathsep}{PLUGINS}",
        "MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json"),
        "PYTHONHASHSEED": "0",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    with _process(command, {}, directory / "master.log", f"http://127.0.0.1:{metrics}/metrics"):
        yield connector, environment


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path, sign_of_life: str) -> Iterator[None]:
    """It answers at that URL; it has ended afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | dict(environment),
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while not _answers(sign_of_life):
                assert process.poll() is None, f"{command[0]} ended:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"{command[0]} does not answer:\n{log.read_text()}"
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        fetched(url)
    except OSError:
        return False
    return True
