"""Everything here runs clients that people use, unmodified, each in a process of its own: `make test-clients`. Nothing here
is part of the default suite.

Their environment is the one that POINTSMAN_CLIENTS_DIR names. `vllm bench serve` comes from the environment of
`make test-vllm`; where that was never made, its tests are skipped with the reason.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pointsman.adapters.tokenizer.tokenizer import BUILTIN_DIRECTORY
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_cli.vllm_cpu.home import EngineHome, default_directory
from tests.support.up import pointsman_up

CLIENTS_VARIABLE = "POINTSMAN_CLIENTS_DIR"
CLIENT_SECONDS_MAX = 240
_HERE = Path(__file__).parent

Client = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies in this folder needs clients and time."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("clients")
            item.add_marker(pytest.mark.timeout(CLIENT_SECONDS_MAX + 60))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetFile]:
    """Two simulated engines of one model and one of another, ten times as fast as real ones."""
    arguments = ("--instances", "2", "--also", "coder=1", "--lora", "poet", "--speed", "10", "--slo-ttft", "120")
    with pointsman_up(tmp_path_factory.mktemp("fleet"), *arguments) as up:
        up.wait_for("Try it")
        yield find_fleet(data=up.data)


@pytest.fixture(scope="session")
def tokenizer_directory() -> Path:
    """The simulated engines' own tokenizer, as clients that count tokens want it."""
    return BUILTIN_DIRECTORY


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """`client("python", "script.py", ...)`: run a program of the clients' environment; what it printed."""
    named = os.environ.get(CLIENTS_VARIABLE)
    if not named:
        pytest.skip(f"{CLIENTS_VARIABLE} names no environment: run make test-clients")
    programs = Path(named).resolve() / "bin"
    return lambda program, *arguments: run(programs / program, *arguments, within=tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="session")
def vllm_client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """The same for programs of vLLM's environment."""
    home = EngineHome(default_directory().resolve())
    if not (home.venv / "bin" / "vllm").exists():
        pytest.skip(f"no vLLM in {home.directory}: run make test-vllm first")
    return lambda *arguments: run(home.venv / "bin" / "vllm", *arguments, within=tmp_path_factory.mktemp("vllm"))


def run(program: Path | str, *arguments: str, within: Path) -> str:
    """What the program printed; fails with it where the program failed."""
    ended = subprocess.run(
        [str(program), *arguments],
        cwd=within,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CLIENT_SECONDS_MAX,
        check=False,
        env=os.environ | {"COLUMNS": "200", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    return ended.stdout
