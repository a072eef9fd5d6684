"""`pointsman-ingress --processes N`, as an operator meets it: one port, one sum of metrics, one SIGTERM."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from pointsman_cli.up.scripts import console_script
from tests.support.nats import running_nats
from tests.support.patched_processes import patch_processes
from tests.support.waiting import eventually

PATH = "/v1/chat/completions"
HUNG_SECONDS = 6.0
"""15 in production; a busy machine may hold up a healthy child for seconds."""


class Ingresses:
    """Several processes of one ingress, and what they logged."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def log(self) -> str:
        return self._output.read_text()

    @property
    def url(self) -> str:
        return self._url_of("port")

    @property
    def admin_url(self) -> str:
        return self._url_of("admin_port")

    def _url_of(self, port: str) -> str:
        found = re.search(rf"listening .*\b{port}=(\d+)", self.log)
        assert found is not None
        return f"http://127.0.0.1:{found[1]}"

    def named(self, event: str) -> list[str]:
        return re.findall(rf" {event} .*process=(\S+)", self.log)

    @property
    def metrics_directories(self) -> list[Path]:
        return list(self._output.parent.glob("pointsman-metrics-*"))

    def pids(self) -> dict[int, int]:
        """Of the newest life of each."""
        return {
            int(number): int(pid) for number, pid in re.findall(r"process_started +number=(\d) pid=(\d+)", self.log)
        }


@contextmanager
def ingresses(nats: str, directory: Path, *arguments: str) -> Iterator[Ingresses]:
    output = directory / "ingress.log"
    script = str(console_script("pointsman-ingress"))
    program = [script, "--nats", nats, "--processes", "3", "--name", "front"]
    environment = {**os.environ, "TMPDIR": str(directory)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*program, "--port", "0", "--admin-port", "0", "--lame-duck-seconds", "0", *arguments],
            stdout=file,
            stderr=file,
            env=environment,
        )
    try:
        yield Ingresses(process, output)
    finally:
        process.kill()
        process.wait()


async def asked(url: str, path: str = PATH, body: bytes = b"{") -> int:
    """The status, over a connection of its own."""
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as client, client.post(url + path, data=body, headers=headers) as answer:
        return answer.status


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as client, client.get(url + "/metrics") as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", await answer.text(), re.MULTILINE)
        return float(found[1]) if found else 0.0


async def counted(front: Ingresses, name: str, expected: int) -> None:
    """Wait for it: a request is counted once its answer is out."""

    async def is_so() -> bool:
        return await metric(front.admin_url, name) == expected

    await eventually(is_so, what=f"{name} is {expected}")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_several_processes_name_a_misspelt_variable_once_serve_one_port_count_together_and_stop_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTSMAN_POLCY", "round_robin")
    refused = f'pointsman_http_requests_total{{model="",pool="",route="{PATH}",status="400"}}'
    async with running_nats(tmp_path) as nats:
        with ingresses(nats, tmp_path) as front:
            await eventually(lambda: len(front.named("log_ready")) == 3, seconds=60)
            assert sorted(front.named("listening")) == ["front-1", "front-2", "front-3"]
            assert front.log.count("POINTSMAN_POLCY") == 1

            statuses = [await asked(front.url) for _ in range(30)]
            assert set(statuses) == {400}
            await counted(front, refused, 30)
            assert await metric(front.admin_url, 'pointsman_nats_connected{pool="default"}') == 1

            killed = front.pids()[2]
            os.kill(killed, signal.SIGKILL)
            await eventually(lambda: front.named("listening").count("front-2") == 2, seconds=60)
            assert f"number=2 pid={killed}" in front.log
            assert "process_ended" in front.log
            assert {await asked(front.url) for _ in range(10)} == {400}
            await counted(front, refused, 40)  # what the dead one counted still counts
            files = [file.stem for directory in front.metrics_directories for file in directory.glob("*.db")]
            assert {name.rpartition("_")[2] for name in files} == {"1", "2", "3"}  # it has left none of its own

            children = list(front.pids().values())
            front.process.terminate()
            await eventually(lambda: front.process.poll() is not None, seconds=60)

    assert front.process.returncode == 0
    assert sorted(set(front.named("shutting_down"))) == ["front-1", "front-2", "front-3"]
    assert not any(map(alive, children))
    assert not front.metrics_directories


async def test_a_child_that_hangs_is_killed_and_started_again_and_none_outlives_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_processes(monkeypatch, tmp_path, {"pointsman.runtime.processes.HUNG_SECONDS": HUNG_SECONDS})
    async with running_nats(tmp_path) as nats:
        with ingresses(nats, tmp_path) as front:
            await eventually(lambda: len(front.named("listening")) == 3, seconds=60)
            stopped = front.pids()[3]
            os.kill(stopped, signal.SIGSTOP)

            await eventually(lambda: front.named("listening").count("front-3") == 2, seconds=60)
            assert re.findall(r"process_unresponsive +number=(\d) pid=(\d+)", front.log) == [("3", str(stopped))]
            assert not alive(stopped)

            front.process.kill()
            await eventually(lambda: not any(map(alive, front.pids().values())))


@pytest.mark.parametrize(("option", "reuse"), [("--port", True), ("--admin-port", False)])
async def test_a_taken_port_and_a_wrong_setting_are_said_once_and_end_it(
    tmp_path: Path, option: str, reuse: bool
) -> None:
    with socket.socket() as taken:
        if reuse:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with ingresses("nats://127.0.0.1:1", tmp_path, option, str(taken.getsockname()[1])) as front:
            await eventually(lambda: front.process.poll() is not None, seconds=60)

    assert front.process.returncode == 1
    assert re.search(rf"cannot listen on .*{option}", front.log)
    assert "Traceback" not in front.log


async def test_a_wrong_setting_is_said_and_ends_all(tmp_path: Path) -> None:
    async with running_nats(tmp_path) as nats:
        with ingresses(nats, tmp_path, "--tokenizer", str(tmp_path / "none")) as front:
            await eventually(lambda: front.process.poll() is not None, seconds=60)

    assert front.process.returncode == 1
    assert "Error: " in front.log
    assert "Traceback" not in front.log
