"""How services end: by a signal, or because they cannot run; on a full disk, and while there is no NATS."""

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from pointsman_cli.up.scripts import console_script
from tests.support.nats import running_nats
from tests.support.waiting import eventually

NO_INSTANCE = ("--nats", "nats://127.0.0.1:9")
END_SECONDS_MAX = 60


@pytest.mark.parametrize(
    ("service", "option"),
    [("ingress", "--port"), ("scheduler", "--port"), ("recorder", "--port"), ("ingress", "--admin-port")],
)
def test_a_service_whose_port_is_taken_ends_and_says_so_in_a_line(service: str, option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = _ended(f"pointsman-{service}", "--port", "0", option, str(port), *NO_INSTANCE, directory=tmp_path)

    assert ended.returncode == 1
    assert f"Error: cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert option in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "shutdown_timeout" not in ended.stderr


def test_an_ingress_that_cannot_read_its_tokenizer_ends_and_says_so_in_a_line() -> None:
    ended = _ended(
        "pointsman-ingress", "--port", "0", "--admin-port", "0", "--tokenizer", "/no/such/place", *NO_INSTANCE
    )

    assert ended.returncode == 1
    assert "/no/such/place" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_recorder_that_is_given_no_url_says_what_one_looks_like() -> None:
    ended = _ended("pointsman-recorder", "--archive-url", "nonsense", *NO_INSTANCE)

    assert ended.returncode == 2
    assert "write for instance sqlite+aiosqlite:///archive.sqlite" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("pointsman-scaler", "--provider", "docker", "--docker-engine-image", "i", "--docker-network", "n"),
        ("pointsman-worker", "--discover", "docker:"),
    ],
    ids=lambda command: command[0],
)
async def test_who_waits_for_a_docker_that_has_stopped_answering_ends_in_time(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("docker", reason="Docker's client is not installed")
    asked = threading.Event()
    async with running_nats(tmp_path) as url:
        with _frozen_docker(asked) as docker:
            monkeypatch.setenv("DOCKER_HOST", docker)
            script, *options = command
            process = await asyncio.create_subprocess_exec(str(console_script(script)), *options, "--nats", url)
            try:
                await eventually(asked.is_set, seconds=END_SECONDS_MAX)
                process.terminate()
                ended = await asyncio.wait_for(process.wait(), END_SECONDS_MAX)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()

    assert ended == 0


def test_who_waits_for_a_name_server_that_answers_nothing_ends_in_time(tmp_path: Path) -> None:
    """The lookup itself takes longer, and cannot be cancelled."""
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.77\noptions timeout:30 attempts:1\n")
    mounted = ("unshare", "--mount", "sh", "-c", f'mount --bind {resolver} /etc/resolv.conf && exec "$@"', "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mounted, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no mounts can be made here")
    options = ("--nats", "nats://nats.nowhere.example:4222", "--port", "0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.77", 53))
        silent.settimeout(END_SECONDS_MAX)
        command = [*mounted, str(console_script("pointsman-scheduler")), *options]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            try:
                silent.recv(512)
                process.terminate()
                ended, errors = process.wait(END_SECONDS_MAX), process.communicate()[1]
            finally:
                process.kill()

    assert ended == 0
    assert "shutdown_timeout" not in errors


@contextmanager
def _frozen_docker(asked: threading.Event) -> Iterator[str]:
    """Says its version, and nothing more."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith("/version"):
                asked.set()
                ended.wait()
                return
            content = b'{"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Version": "28"}'
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        @override
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"tcp://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()


def test_nobody_fails_for_a_log_line_that_cannot_be_written() -> None:
    says = "from pointsman.runtime.structured_logs import configure_logging as c; import structlog; c('info', 'text')\n"
    says += "for _ in range(1000): structlog.get_logger().info('a line')\nprint('goes on')"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-c", says], stdout=subprocess.PIPE, stderr=full, check=False)

    assert (ended.returncode, ended.stdout) == (0, b"goes on\n")


def _ended(service: str, *arguments: str, directory: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [str(console_script(service)), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=END_SECONDS_MAX, check=False)
