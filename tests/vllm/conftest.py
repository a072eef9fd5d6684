"""Everything here runs against real vLLM engines: `make test-vllm`. Nothing here is part of the default suite.

`real_fleet` is the whole of `pointsman up --engine vllm --engines 2`, started once for the session and shared: tests use
prompts of their own (`unlike_any_other`), so that what others left in the caches does not matter. `boot_engine` starts a
further engine with flags of one's own, for a test or a module; on two cores, prefer the two that run. `versatile_engine`
is one more for the session: it takes every kind of request, its chats by a template that shows all that templates are given.
`tell_what_was_measured` takes what people shall read at the end of the run.

The engines come from POINTSMAN_VLLM_DIR or the user's cache, and are made there on the first use, which takes minutes.
Where this machine cannot run them, everything is skipped with the reason, and the summary says so.
"""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pointsman_cli.vllm_cpu import machine, recipe
from pointsman_cli.vllm_cpu.home import EngineHome, default_directory
from tests.support import vllm
from tests.support.vllm import RealFleet, RunningEngine

TEST_SECONDS_MAX = 1200
"""The first test waits for the engines to boot."""

BootEngine = Callable[..., AbstractContextManager[RunningEngine]]
ADAPTER = "french"
"""What the versatile engine calls its LoRA adapter."""

_HERE = Path(__file__).parent
_TEMPLATE = _HERE / "chat_template.jinja"
_MEASURED = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies in this folder needs engines and time."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("vllm")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS_MAX))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was measured; and what could not run, and why: last, where it is read."""
    if measured := config.stash.get(_MEASURED, []):
        terminalreporter.section("real engines: what was measured")
        for text in measured:
            terminalreporter.line(text)
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/vllm" in report.nodeid]
    if not skipped:
        return
    terminalreporter.section("real engines: what could not run, and why")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def vllm_home(request: pytest.FixtureRequest) -> EngineHome:
    """The environment with vLLM's CPU build and the model, made where it is not. Skips where that cannot be."""
    home = EngineHome(default_directory().resolve())
    try:
        recipe.make(home, lambda line: _report(request.config, line))
        machine.check_can_run(engines=2)
    except (machine.UnsuitableMachineError, recipe.MakingError) as error:
        pytest.skip(f"no real engine here: {error}")
    return home


@pytest.fixture(scope="session")
def real_fleet(vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """Two real engines behind a whole fleet, for every test of the session."""
    with vllm.real_fleet(vllm_home, directory=tmp_path_factory.mktemp("real-fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def boot_engine(vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory) -> BootEngine:
    """`with boot_engine("--num-gpu-blocks-override", "64") as engine`: an engine of one's own, ended afterwards."""

    def boot(*flags: str, served_model: str = "smollm2-135m") -> AbstractContextManager[RunningEngine]:
        directory = tmp_path_factory.mktemp("engine")
        return vllm.booted(vllm_home, *flags, directory=directory, served_model=served_model)

    return boot


@pytest.fixture(scope="session")
def versatile_engine(
    boot_engine: BootEngine, vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEngine]:
    """A template that shows tools, a parser that makes calls of what the model says, an adapter, embeddings for prompts."""
    adapter = tmp_path_factory.mktemp("adapter")
    vllm.write_adapter(adapter, json.loads((vllm_home.model / "config.json").read_text()))
    flags = [
        *("--chat-template", str(_TEMPLATE), "--trust-request-chat-template"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"),
        *("--enable-prompt-embeds", "--enable-scale-out"),
    ]
    with boot_engine(*flags) as running:
        yield running


@pytest.fixture(scope="session")
def versatile_tokenizer(vllm_home: EngineHome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model's own tokenizer, and the template that the versatile engine was given."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((vllm_home.model / name).read_bytes())
    (directory / _TEMPLATE.name).write_text(_TEMPLATE.read_text())
    return directory


@pytest.fixture
def tell_what_was_measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a text that people shall read at the end of the run, whether or not tests fail."""
    return request.config.stash.setdefault(_MEASURED, []).append


@pytest.fixture
def unlike_any_other() -> str:
    """Words that no other prompt of this session begins with."""
    return f"Note {uuid.uuid4().hex}."


def _report(config: pytest.Config, line: str) -> None:
    """Print at once: making the environment takes minutes."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        terminal.ensure_newline()
        terminal.line(line)
