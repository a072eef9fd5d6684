"""Processes, tried with real ones, and Docker, as far as its client's HTTP tells (a server of ours keeps what it says).

There is no Docker engine where these tests run; that a real one answers like this is not shown here. Kubernetes:
test_kubernetes_provider.py.
"""

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs
from typing_extensions import override

from pointsman.adapters.log_files import cut_if_large
from pointsman.adapters.providers.process import InstanceTemplate, ProcessProvider, kill_all, stop_all
from pointsman.adapters.tcp_ports import free_ports
from pointsman.ports import InstanceProvider, ProviderError
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.runtime import instance_supervisor
from pointsman.runtime.instance_supervisor import STOP_SECONDS, InstanceSupervisor, SupervisedInstance
from pointsman_scaler.main import main as scaler
from tests.support.waiting import eventually

SUPERVISOR = instance_supervisor.__name__
SLEEPER = shlex.join([sys.executable, "-c", "import time; time.sleep(600)"])


async def names(provider: InstanceProvider) -> list[str]:
    return sorted(provided.instance for provided in await provider.running())


# Processes


def processes(directory: Path, engine: str = SLEEPER, pool: str = "p", **template: Any) -> ProcessProvider:
    values: dict[str, Any] = {"supervisor": SUPERVISOR, "engine": engine, "environment": {}} | template
    return ProcessProvider(directory, InstanceTemplate(**values), PoolName(pool))


async def test_processes_are_started_once_outlive_their_provider_and_are_found_by_the_next(tmp_path: Path) -> None:
    first, second = processes(tmp_path), processes(tmp_path)
    try:
        await first.grow(2)
        await second.grow(2)
        started = await names(second)
        await _until_told(tmp_path, 2)
        await second.stop(InstanceId("scaled-1"))
        await second.stop(InstanceId("scaled-1"))
        left = await names(first)
        await first.grow(2)
        again = await names(first)
    finally:
        await _until_told(tmp_path, 2)
        await stop_all(tmp_path)

    assert started == ["scaled-1", "scaled-2"]
    assert left == ["scaled-2"]
    assert again == ["scaled-1", "scaled-2"]
    assert await names(first) == []


async def test_pools_with_one_directory_leave_each_others_engines_alone(tmp_path: Path) -> None:
    a, b = processes(tmp_path, pool="a"), processes(tmp_path, pool="b")
    try:
        await a.grow(2)
        await b.grow(1)
        await _until_told(tmp_path, 3)
        seen = [await names(a), await names(b)]
        await b.stop(InstanceId("scaled-1"))
        left = [await names(a), await names(b)]
    finally:
        await stop_all(tmp_path)

    assert seen == left == [["scaled-1", "scaled-2"], ["scaled-3"]]
    assert await names(a) == await names(b) == []


async def test_an_instance_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = processes(tmp_path)
    try:
        await provider.grow(1)
        await _until_told(tmp_path, 1)
        os.kill(int((tmp_path / "scaled-1.lock").read_text()), signal.SIGSTOP)
        monkeypatch.setattr("pointsman.adapters.providers.process.STOP_WALL_SECONDS", WallSeconds(2.0))
        await provider.stop(InstanceId("scaled-1"))

        assert await names(provider) == []
    finally:
        await kill_all(tmp_path)


async def test_an_engine_of_the_release_before_is_found_and_stopped(tmp_path: Path) -> None:
    """It named no pool."""
    provider = processes(tmp_path)
    try:
        await provider.grow(1)
        await _until_told(tmp_path, 1)
        (tmp_path / "scaled-1.pool").unlink()
        found = await names(provider)
        await provider.stop(InstanceId("scaled-1"))
    finally:
        await stop_all(tmp_path)

    assert found == ["scaled-1"]
    assert await names(provider) == []


async def test_what_the_operating_system_refuses_is_the_providers_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as files of another user, or no more files."""
    provider = processes(tmp_path)
    (tmp_path / "scaled-1.lock").write_text("1")

    def refused(_lock: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pointsman.adapters.providers.process.is_locked", refused)
    with pytest.raises(ProviderError, match=r"the instances here cannot be read: .* Permission denied"):
        await provider.running()
    with pytest.raises(ProviderError, match=r"scaled-1 cannot be stopped: .* Permission denied"):
        await provider.stop(InstanceId("scaled-1"))


async def told_of_its_end(provider: ProcessProvider) -> str:
    await provider.grow(1)
    await _until_gone(provider)
    with pytest.raises(ProviderError) as told:
        await provider.grow(0)
    return str(told.value)


async def test_an_engine_that_ends_at_its_start_is_started_again_and_told_of(tmp_path: Path) -> None:
    provider = processes(tmp_path, shlex.join([sys.executable, "-c", "import sys; sys.exit('no such model: m')"]))
    await provider.grow(1)
    await _until_gone(provider)
    with pytest.raises(ProviderError) as told:
        await provider.grow(1)
    running = await names(provider)
    await _until_gone(provider)

    assert str(told.value).startswith("scaled-1 ended by itself after ")
    assert str(told.value).endswith("s: engine ended with exit code 1: no such model: m")
    assert running == ["scaled-1"]


async def test_starts_that_do_not_last_are_counted(tmp_path: Path) -> None:
    provider = processes(tmp_path, "true")

    told = [await told_of_its_end(provider) for _ in range(2)]

    assert "start number" not in told[0]
    assert "start number 2 that did not last: engine ended with exit code 0" in told[1]


async def test_a_program_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    told = await told_of_its_end(processes(tmp_path, "no-such-program"))

    assert "it cannot be started: [Errno 2]" in told


async def test_a_worker_with_wrong_settings_ends_its_engine(tmp_path: Path) -> None:
    told = await told_of_its_end(processes(tmp_path, environment={"POINTSMAN_BLOCK_TOKENS": "many"}))

    assert "worker ended with exit code 2: " in told
    assert "many" in told


class FastTime:
    """Twenty times as fast; calls `over` after `seconds`."""

    def __init__(self, seconds: float, over: Callable[[], None]) -> None:
        self.now, self._seconds, self._over = 0.0, seconds, over

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 20)
        self.now += seconds
        if self.now > self._seconds:
            self._over()


def supervised(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, engine: str, worker: str, seconds: float
) -> list[float]:
    """Runs a supervisor for so long. Returns when it started workers."""
    spec = SupervisedInstance(
        instance="e", engine=shlex.split(engine), environment={}, guard="", logs=str(directory), lock=""
    )
    supervisor, started = InstanceSupervisor(spec, directory), list[float]()
    clock = FastTime(seconds, supervisor.stop)

    def start_worker() -> None:
        started.append(clock.now)
        supervisor._spawn("worker", shlex.split(worker), dict(os.environ))

    monkeypatch.setattr(supervisor, "_start_worker", start_worker)
    monkeypatch.setattr(instance_supervisor, "time", clock)
    assert supervisor.run() == ""
    return started


def test_a_worker_that_fails_is_started_again_after_longer_and_longer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = supervised(tmp_path, monkeypatch, engine=SLEEPER, worker="false", seconds=40.0)

    waits = [after - before for before, after in pairwise(started)]
    assert waits == sorted(waits)
    assert len(waits) >= 4
    assert waits[-1] > 3.0


def test_the_logs_of_an_instance_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_supervisor, "cut_if_large", partial(cut_if_large, bytes_max=1000))
    chatty = shlex.join([sys.executable, "-c", "import time; print('x' * 5000, flush=True); time.sleep(600)"])

    supervised(tmp_path, monkeypatch, engine=chatty, worker=chatty, seconds=20.0)

    assert [(tmp_path / f"e-{part}.log").stat().st_size < 1000 for part in ("engine", "worker")] == [True, True]


async def test_no_argument_and_no_engine_has_the_deployments_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may read the arguments of a process."""
    monkeypatch.setenv("POINTSMAN_ENGINE_API_KEY", "hush")
    shown = tmp_path / "shown"
    code = f"import os, pathlib, time; pathlib.Path({str(shown)!r}).write_text(repr(dict(os.environ))); time.sleep(60)"
    engine = shlex.join([sys.executable, "-c", code])
    provider = processes(tmp_path, engine, environment={"POINTSMAN_SECRET": "hush"})
    try:
        await provider.grow(1)
        await _until_told(tmp_path, 1)
        await eventually(lambda: shown.exists() and bool(shown.read_text()))
        supervisor = (tmp_path / "scaled-1.lock").read_text()
        arguments = (Path("/proc") / supervisor / "cmdline").read_text()
    finally:
        await stop_all(tmp_path)

    assert SUPERVISOR in arguments
    assert "hush" not in arguments
    assert "hush" not in shown.read_text()
    assert await names(provider) == []


async def test_an_instance_ends_when_its_keeper_is_killed(tmp_path: Path) -> None:
    provider = processes(tmp_path)
    await provider.grow(1)
    await _until_told(tmp_path, 1)
    os.kill(int((tmp_path / "scaled-1.lock").read_text()), signal.SIGKILL)

    await _until_gone(provider)


async def test_an_engine_that_does_not_stop_can_be_killed_while_it_is_waited_for(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    code = f"import signal, pathlib, time; signal.signal(15, signal.SIG_IGN); pathlib.Path({str(deaf)!r}).touch()"
    engine = shlex.join([sys.executable, "-c", code + "; time.sleep(60)"])
    provider = processes(tmp_path, engine)
    await provider.grow(1)
    await _until_told(tmp_path, 1)
    await eventually(deaf.exists)

    stopping = asyncio.create_task(stop_all(tmp_path))
    async with asyncio.timeout(STOP_SECONDS - 2):
        await kill_all(tmp_path)
        await stopping

    assert await names(provider) == []


async def test_an_instance_ends_with_the_fleet_that_it_belongs_to(tmp_path: Path) -> None:
    guard = tmp_path / "fleet.lock"
    guard.touch()  # nobody holds it: the fleet is gone
    provider = processes(tmp_path / "instances", guard=guard)
    await provider.grow(1)

    await _until_gone(provider)


def test_an_engine_without_a_command_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="engine-command"):
        processes(tmp_path, engine="")


async def _until_gone(provider: InstanceProvider) -> None:
    async def gone() -> bool:
        supervisors_not_reaped = getattr(provider, "_supervisors", [])
        return not await names(provider) and not supervisors_not_reaped

    await eventually(gone)


async def _until_told(directory: Path, keepers: int) -> None:
    """Until every keeper has written down which process it is."""
    await eventually(lambda: sum(bool(lock.read_text()) for lock in directory.glob("scaled-*.lock")) >= keepers)


# A server that answers like Docker


class FakeServer(ABC):
    """An HTTP server of JSON; `answer` is given method, path, query and body, and says status and body."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @abstractmethod
    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]: ...

    @contextmanager
    def listening(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                parts = urlsplit(self.path)
                fake.seen.append((self.command, parts.path))
                status, answer = fake.answer(self.command, parts.path, parse_qs(parts.query), body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode() * (answer is not None)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815 - http.server's names

            @override
            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class FakeDocker(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self.containers: dict[str, dict[str, Any]] = {}
        self.stopped: list[str] = []
        self.start_status = 204
        self.images = {"vllm"}
        self.log = b""

    @override
    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        path = path.partition("/v1.")[2].partition("/")[2] if "/v1." in path else path.lstrip("/")
        parts = path.split("/")
        if path == "version":
            return 200, {"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Version": "25"}
        if path == "containers/create":
            name = query["name"][0]
            if body["Image"] not in self.images:
                return 404, {"message": f"No such image: {body['Image']}"}
            if name in self.containers:
                return 409, {"message": f"the name {name} is in use"}
            self.containers[name] = {"Config": body, "State": "created"}
            return 201, {"Id": name, "Warnings": []}
        if path == "containers/json":
            wanted = json.loads(query["filters"][0])["label"]
            return 200, [
                {"Id": name}
                for name, made in self.containers.items()
                if all(label in [f"{k}={v}" for k, v in made["Config"]["Labels"].items()] for label in wanted)
            ]
        name = parts[1]
        if name not in self.containers:
            return 404, {"message": f"no container {name}"}
        if method == "DELETE":
            del self.containers[name]
            return 204, None
        if parts[-1] == "start" and self.start_status != 204:
            return self.start_status, {"message": "no such device: nvidia.com/gpu"}
        if parts[-1] == "start":
            self.containers[name]["State"] = "running"
            return 204, None
        if parts[-1] == "stop":
            self.stopped.append(name)
            return 204, None
        if parts[-1] == "logs":
            return 200, self.log
        made = self.containers[name]
        running = made["State"] == "running"
        address = f"172.18.0.{list(self.containers).index(name) + 2}" if running else ""
        return 200, {
            "Id": name,
            "Name": f"/{name}",
            "Created": "2026-11-21T07:00:00Z",
            "State": {
                "Status": made["State"],
                "ExitCode": 1,
                "StartedAt": "2026-11-21T07:00:00.5Z",
                "FinishedAt": "2026-11-21T07:00:07.5Z",
            },
            "Config": {"Labels": made["Config"]["Labels"], "Tty": True},
            "NetworkSettings": {"Networks": {"n": {"IPAddress": address}}},
        }


@pytest.mark.parametrize(
    ("dns", "named"),
    [
        ("", ["pointsman-p-scaled-1", "pointsman-p-scaled-2"]),
        ("engine:8000", ["172-18-0-2-8000", "172-18-0-3-8000"]),
    ],
)
async def test_containers_are_started_once_and_named_as_discovery_names_them(dns: str, named: list[str]) -> None:
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    fake = FakeDocker()
    template = ContainerTemplate(image="vllm", command="--model m --name {instance}", network="n", dns=dns)
    with fake.listening() as address:
        first, second = (DockerProvider(PoolName("p"), template, url=f"tcp://{address}") for _ in range(2))
        await first.grow(2)
        await second.grow(2)
        started = await names(second)
        config = fake.containers["pointsman-p-scaled-2"]["Config"]
        await second.stop(InstanceId(named[1]))
        await first.stop(InstanceId(named[1]))
        left = await names(first)
        await asyncio.to_thread(first._docker.close)
        await asyncio.to_thread(second._docker.close)

    assert started == named
    assert left == named[:1]
    assert fake.stopped == ["pointsman-p-scaled-2"]
    assert config["Cmd"] == ["--model", "m", "--name", "pointsman-p-scaled-2"]
    assert config["NetworkingConfig"]["EndpointsConfig"]["n"].get("Aliases") == (["engine"] if dns else None)
    assert config["HostConfig"]["CapDrop"] == ["ALL"]


async def test_pools_on_one_docker_leave_each_others_engines_alone() -> None:
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    template = ContainerTemplate(image="vllm", command="--model m", network="n")
    with FakeDocker().listening() as address:
        a, b = (DockerProvider(PoolName(pool), template, url=f"tcp://{address}") for pool in "ab")
        for pool in (a, b):
            await pool.grow(1)
        seen = [await names(a), await names(b)]
        await b.stop(InstanceId("pointsman-a-scaled-1"))
        left = [await names(a), await names(b)]
        for pool in (a, b):
            await asyncio.to_thread(pool._docker.close)

    assert seen == left == [["pointsman-a-scaled-1"], ["pointsman-b-scaled-1"]]


def test_a_scaler_whose_docker_is_not_up_yet_fails_so_that_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 says that a setting is wrong: systemd does not start such a process again."""
    pytest.importorskip("docker", reason="Docker's client is not installed")
    (port,) = free_ports(1)
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")

    refused = CliRunner().invoke(scaler, ["--provider", "docker", "--docker-engine-image", "vllm"])

    assert refused.exit_code == 1
    assert "Docker does not answer" in refused.output
    assert "DOCKER_HOST" in refused.output


async def test_a_container_that_cannot_be_started_is_no_instance() -> None:
    """One that stayed would count until it should have answered."""
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    fake = FakeDocker()
    fake.start_status = 500
    with fake.listening() as address:
        provider = DockerProvider(
            PoolName("p"), ContainerTemplate(image="vllm", command="", network="n"), url=f"tcp://{address}"
        )
        with pytest.raises(ProviderError, match="no such device"):
            await provider.grow(1)
        left = await names(provider)
        fake.start_status = 204
        await provider.grow(1)
        again = await names(provider)
        await asyncio.to_thread(provider._docker.close)

    assert left == []
    assert again == ["pointsman-p-scaled-1"]


async def test_a_paused_container_stays_with_its_cache() -> None:
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    fake = FakeDocker()
    with fake.listening() as address:
        provider = DockerProvider(
            PoolName("p"), ContainerTemplate(image="vllm", command="", network="n"), url=f"tcp://{address}"
        )
        await provider.grow(1)
        fake.containers["pointsman-p-scaled-1"]["State"] = "paused"
        fake.seen.clear()
        await provider.grow(2)
        lists = [path for method, path in fake.seen if method == "GET" and path.endswith("containers/json")]
        found = await names(provider)
        await asyncio.to_thread(provider._docker.close)

    assert found == ["pointsman-p-scaled-1", "pointsman-p-scaled-2"]
    assert fake.stopped == []
    assert len(lists) == 1


async def test_a_container_that_ended_is_replaced_and_told_of() -> None:
    """Its log goes with it."""
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    fake = FakeDocker()
    fake.log = b"loading\nno such model: m\n"
    template = ContainerTemplate(image="vllm", command="", network="n")
    with fake.listening() as address, capture_logs() as logged:
        provider = DockerProvider(PoolName("p"), template, url=f"tcp://{address}")
        await provider.grow(2)
        fake.containers["pointsman-p-scaled-1"]["State"] = "exited"
        left = await names(provider)
        with pytest.raises(ProviderError) as told:
            await provider.grow(2)
        again = await names(provider)
        await provider.grow(2)
        await asyncio.to_thread(provider._docker.close)

    assert left == ["pointsman-p-scaled-2"]
    assert again == ["pointsman-p-scaled-1", "pointsman-p-scaled-2"]
    why = "pointsman-p-scaled-1 ended by itself after 7 s: container ended with exit code 1: no such model: m"
    assert str(told.value) == why
    (ended,) = [entry for entry in logged if entry["event"] == "instance_ended"]
    assert ended["log"] == ["loading", "no such model: m"]


async def test_an_image_that_is_not_there_is_not_pulled_but_told_of() -> None:
    """Pulling one takes minutes, in which the scaler would do nothing else."""
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    fake = FakeDocker()
    fake.images.clear()
    with fake.listening() as address:
        provider = DockerProvider(
            PoolName("p"), ContainerTemplate(image="vllm", command="", network="n"), url=f"tcp://{address}"
        )
        with pytest.raises(ProviderError, match=r"Docker has no image vllm; fetch it with: docker pull vllm"):
            await provider.grow(1)
        await asyncio.to_thread(provider._docker.close)

    assert not [path for _, path in fake.seen if "images" in path]


async def test_a_call_that_docker_leaves_unanswered_gets_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker", reason="Docker's client is not installed")
    from pointsman.adapters.providers.docker import ContainerTemplate, DockerProvider

    calls, go_on = list[str](), threading.Event()

    def hang() -> list[Any]:
        calls.append("list")
        go_on.wait(10.0)
        return []

    with FakeDocker().listening() as address:
        provider = DockerProvider(
            PoolName("p"), ContainerTemplate(image="vllm", command="", network="n"), url=f"tcp://{address}"
        )
        monkeypatch.setattr(provider, "_containers", hang)
        running = asyncio.ensure_future(provider.running())
        await eventually(lambda: calls)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(3):
            with pytest.raises(ProviderError, match="has not answered an earlier call yet"):
                await provider.running()
        unanswered = len(calls)
        go_on.set()
        await eventually(lambda: provider._left is not None and provider._left.done())
        again = await names(provider)
        await asyncio.to_thread(provider._docker.close)

    assert (unanswered, len(calls), again) == (1, 2, [])
