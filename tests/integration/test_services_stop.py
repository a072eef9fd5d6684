"""How services end: by a signal, or because they cannot run; on a full disk, and while there is no NATS."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pointsman_cli.up.scripts import console_script

NO_INSTANCE = ("--nats", "nats://127.0.0.1:9")
END_SECONDS_MAX = 60


@pytest.mark.parametrize("service", ["ingress", "scheduler", "recorder"])
def test_a_service_whose_port_is_taken_ends_and_says_so_in_a_line(service: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = _ended(f"pointsman-{service}", "--port", str(port), *NO_INSTANCE, directory=tmp_path)

    assert ended.returncode == 1
    assert f"Error: cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "shutdown_timeout" not in ended.stderr


def test_an_ingress_whose_admin_port_is_taken_ends_and_says_so_in_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--port", "0", "--admin-port", str(port))
        ended = _ended("pointsman-ingress", *options, *NO_INSTANCE, directory=tmp_path)

    assert ended.returncode == 1
    assert f"Error: cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "--admin-port" in ended.stderr
    assert "Traceback" not in ended.stderr


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


def test_nobody_fails_for_a_log_line_that_cannot_be_written() -> None:
    says = "from pointsman.runtime.structured_logs import configure_logging as c; import structlog; c('info', 'text')\n"
    says += "for _ in range(1000): structlog.get_logger().info('a line')\nprint('goes on')"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-c", says], stdout=subprocess.PIPE, stderr=full, check=False)

    assert (ended.returncode, ended.stdout) == (0, b"goes on\n")


def _ended(service: str, *arguments: str, directory: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [str(console_script(service)), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=END_SECONDS_MAX, check=False)
