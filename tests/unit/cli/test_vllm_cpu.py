"""The making of the CPU engine's home: what counts as ready, what goes on where, and what people are told."""

import os
import sys
from pathlib import Path

import pytest

from pointsman_cli.vllm_cpu import machine, recipe
from pointsman_cli.vllm_cpu.home import EngineHome, default_directory
from pointsman_cli.vllm_cpu.recipe import Making, MakingError, Step


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineHome:
    """A home on a machine that suits."""
    monkeypatch.setattr(machine, "check_can_run", lambda: None)
    monkeypatch.setattr(machine, "check_can_make", lambda _: None)
    return EngineHome(tmp_path / "home")


def steps_of(monkeypatch: pytest.MonkeyPatch, done: list[str], *, failing: str = "", inputs: str = "1") -> None:
    """A recipe of three steps that write down that they were carried out."""

    def step(name: str) -> Step:
        def work(_: Making) -> None:
            if name == failing:
                raise KeyboardInterrupt
            done.append(name)

        return Step(name, name, inputs if name == "second" else "", work)

    monkeypatch.setattr(recipe, "STEPS", tuple(step(name) for name in ("first", "second", "third")))


def test_a_home_that_was_interrupted_is_not_ready_and_goes_on_where_it_stopped(
    home: EngineHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    steps_of(monkeypatch, done, failing="second")
    with pytest.raises(KeyboardInterrupt):
        recipe.make(home, report=lambda _: None)
    ready_between = recipe.is_ready(home)
    steps_of(monkeypatch, done)
    recipe.make(home, report=lambda _: None)

    assert not ready_between
    assert done == ["first", "second", "third"]
    assert recipe.is_ready(home)


def test_another_version_of_one_step_makes_it_and_what_follows_anew(
    home: EngineHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    steps_of(monkeypatch, done, inputs="1")
    recipe.make(home, report=lambda _: None)
    steps_of(monkeypatch, done, inputs="2")
    ready_for_the_new_one = recipe.is_ready(home)
    recipe.make(home, report=lambda _: None)

    assert not ready_for_the_new_one
    assert done == ["first", "second", "third", "second", "third"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[Errno -3] Temporary failure in name resolution", "no package index can be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0", "do not have what is needed"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_a_failed_step_says_what_helps_and_shows_the_end_of_the_log(home: EngineHome, said: str, told: str) -> None:
    home.directory.mkdir()
    making = Making(home, "2/5 torch", report=lambda _: None)

    with pytest.raises(MakingError, match=told) as caught:
        making.run([sys.executable, "-c", f"raise SystemExit({said!r})"])

    assert f"| {said}" in str(caught.value)
    assert str(home.log) in str(caught.value)


def test_a_processor_that_is_too_old_is_refused_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_cpu_flags", lambda: {"sse4_2", "avx"})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    with pytest.raises(machine.UnsuitableMachineError, match="neither AVX2 nor AVX-512"):
        recipe.make(EngineHome(tmp_path / "home"), report=lambda _: None)

    assert not (tmp_path / "home").exists()


def test_a_disk_that_is_too_full_is_refused_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES_MIN", 1 << 62)

    with pytest.raises(machine.UnsuitableMachineError, match="GiB are needed; make room, or name another directory"):
        machine.check_can_make(tmp_path / "home" / "deeper")


def test_the_home_is_where_the_environment_says_else_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("POINTSMAN_VLLM_DIR", raising=False)
    unsaid = default_directory()
    monkeypatch.setenv("POINTSMAN_VLLM_DIR", "/here")

    assert unsaid == Path("/cache/pointsman/vllm-cpu")
    assert default_directory() == Path("/here")


def test_what_is_set_in_the_environment_wins_over_the_engines_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    command = EngineHome(Path("/here")).serve_command(["--max-model-len", "512"], threads=2)

    assert {"OMP_NUM_THREADS=7", "HF_HUB_OFFLINE=1", "VLLM_CPU_KVCACHE_SPACE=1"} <= set(command)
    assert command[-2:] == ["--max-model-len", "512"]
    assert os.environ["HF_HUB_OFFLINE"] == "0"
