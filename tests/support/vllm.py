"""Real vLLM engines for tests: started one by one with flags of one's own, or two behind a `pointsman up`."""

import json
import os
import signal
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.adapters.child_process import die_with_parent
from pointsman.adapters.tcp_ports import free_ports
from pointsman.runtime.engine_command import EnginePlaces
from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_cli.vllm_cpu.home import EngineHome
from tests.support.up import RunningUp, pointsman_up

BOOT_SECONDS_MAX = 900.0
"""On two shared cores an engine takes 40 to 150 s, two at once twice that."""

STOP_SECONDS_MAX = 20.0
ANSWER_SECONDS_MAX = 120.0
VERDICT_SECONDS_MAX = 180.0
"""Until `up` says of an engine that ran already whether its keys agree."""

BLOCK_TOKENS = 32
"""Block size of the engines and of the pool's keys."""

DEVELOPER_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens /reset_prefix_cache."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A real engine that answers. `kv` and `replay` are the endpoints of its KV events; any number may listen."""

    name: str
    url: str
    kv: str
    replay: str
    log: Path
    pid: int

    @property
    def address(self) -> str:
        """As `--engine` and `--also` take it."""
        return f"{self.url}#kv={self.kv}&replay={self.replay}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that it answers; a POST where there is a body. Raises urllib.error.HTTPError."""
        return answer_of(self.url + path, body)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, as `vllm:prefix_cache_hits_total`."""
        page = fetched(f"{self.url}/metrics").decode()
        samples = [line for line in page.splitlines() if line.partition("{")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def reset_cache(self) -> None:
        """Have it forget every prefix. Its event may be held back until its next step."""
        fetched(f"{self.url}/reset_prefix_cache", b"")


@dataclass(frozen=True, slots=True)
class RealFleet:
    """A `pointsman up --engine vllm --engines 2`, ready."""

    up: RunningUp
    file: FleetFile
    engines: tuple[RunningEngine, ...]

    @property
    def url(self) -> str:
        """Of the ingress."""
        return self.file.ingress

    @property
    def model(self) -> str:
        return self.file.model

    def engine(self, name: str) -> RunningEngine:
        return next(engine for engine in self.engines if engine.name == name)

    def ask(self, path: str, body: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
        """The JSON that the ingress answers, and its headers (lower case). Raises urllib.error.HTTPError."""
        with urllib.request.urlopen(request_for(self.url + path, body), timeout=ANSWER_SECONDS_MAX) as answer:
            return json.load(answer), {name.lower(): value for name, value in answer.headers.items()}


@contextmanager
def booted(
    home: EngineHome,
    *flags: str,
    directory: Path,
    served_model: str = "smollm2-135m",
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningEngine]:
    """A real engine with KV events, prefix caching and blocks of BLOCK_TOKENS, and whatever else `flags` say (they win);
    it has ended afterwards. `{port}`, `{kv}` and the like are filled in. Its log is `engine.log` in `directory`."""
    port, kv_port, replay_port = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="pm-") as sockets, (directory / "engine.log").open("wb") as log:
        places = EnginePlaces(
            instance="engine",
            port=port,
            kv=f"ipc://{sockets}/kv",
            replay=f"ipc://{sockets}/replay",
            kv_port=kv_port,
            replay_port=replay_port,
        )
        usual = ["--port", "{port}", "--block-size", str(BLOCK_TOKENS), "--kv-events-config", "{kv_events}"]
        command = home.serve_command([*usual, *flags], served_model=served_model)
        process = subprocess.Popen(
            places.filled(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | DEVELOPER_MODE | dict(environment or {}),
            process_group=0,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        kv, replay = places.sockets(command)
        engine = RunningEngine("engine", f"http://127.0.0.1:{port}", kv, replay, directory / "engine.log", process.pid)
        try:
            _wait_until_healthy(engine, process)
            yield engine
        finally:
            _stop(process)


@contextmanager
def real_fleet(home: EngineHome, *arguments: str, directory: Path) -> Iterator[RealFleet]:
    """Two real engines behind `pointsman up`, from ready to stopped. `arguments` go to `up`."""
    told = ["--engine", "vllm", "--instances", "2", *arguments]
    with _developer_mode(), pointsman_up(directory, *told) as up:
        up.wait_for("Stop +Ctrl-C", BOOT_SECONDS_MAX)
        for number in (1, 2):
            up.wait_for(f"[✓✗?] engine-{number} .*", ANSWER_SECONDS_MAX)
        file = find_fleet(data=up.data)
        yield RealFleet(up, file, tuple(_engine_of(up, file, number) for number in (1, 2)))
        up.stop()


def write_adapter(directory: Path, config: dict[str, Any]) -> None:
    """A LoRA adapter that changes nothing, as PEFT writes them."""
    rank, hidden = 8, config["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {name.format("A"): [rank, hidden], name.format("B"): [hidden, rank]}
    header, end = {}, 0
    for tensor, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))
    peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"]}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(peft))


def answer_of(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON that a URL answers; a POST where there is a body. Raises urllib.error.HTTPError."""
    with urllib.request.urlopen(request_for(url, body), timeout=ANSWER_SECONDS_MAX) as answer:
        return json.load(answer)


def fetched(url: str, body: bytes | None = None) -> bytes:
    """What a URL answers, as it is; a POST where there is a body. Raises urllib.error.HTTPError."""
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=ANSWER_SECONDS_MAX) as answer:
        return bytes(answer.read())


def request_for(url: str, body: Mapping[str, Any] | None) -> urllib.request.Request:
    encoded = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, encoded, {"content-type": "application/json"})


def _engine_of(up: RunningUp, file: FleetFile, number: int) -> RunningEngine:
    """What `up` started, with the sockets that it told the engine."""
    name = f"engine-{number}"
    process = next(process for process in file.processes if process.name == name)
    said = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    events = json.loads(said[said.index(b"--kv-events-config") + 1])
    log = up.data / "logs" / f"{name}.log"
    return RunningEngine(name, process.url, events["endpoint"], events["replay_endpoint"], log, process.pid)


@contextmanager
def _developer_mode() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(DEVELOPER_MODE)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait_until_healthy(engine: RunningEngine, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + BOOT_SECONDS_MAX
    while True:
        try:
            fetched(f"{engine.url}/health")
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, f"the engine ended:\n{_tail(engine.log)}"
            assert time.monotonic() < deadline, f"the engine does not answer:\n{_tail(engine.log)}"
            time.sleep(0.2)
        else:
            return


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
