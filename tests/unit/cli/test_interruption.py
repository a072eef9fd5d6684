"""Exit codes of commands that Ctrl-C ends: 0 only where the command would have run until then."""

import subprocess
import sys
from typing import NoReturn

import pytest
from click.testing import CliRunner

from pointsman.runtime.settings import FleetSettings
from pointsman_cli import drain, fleet, scale
from pointsman_cli.main import main
from pointsman_cli.tap import command as tap


async def interrupted(*_arguments: object, **_options: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["drain", "engine-1", "--wait"], 130),
        (["scale", "4", "--wait"], 130),
        (["fleet"], 130),
        (["fleet", "--watch"], 0),
        (["tap", "--since", "1", "--until", "9"], 130),
        (["tap"], 0),
    ],
)
def test_ctrl_c_is_no_success_of_a_command_that_had_an_end(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, work in ((drain, "_drain"), (scale, "_scale"), (fleet, "_show"), (tap, "_tap")):
        monkeypatch.setattr(module, "fleet_settings", lambda *_, **__: FleetSettings())
        monkeypatch.setattr(module, work, interrupted)

    assert CliRunner().invoke(main, arguments).exit_code == code


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        ("keys list", "pointsman_cli.keys.fleet_settings"),
        ("tenants show", "pointsman_cli.tenants.fleet_settings"),
        ("doctor", "pointsman_cli.doctor.command.open_history"),
    ],
)
def test_ctrl_c_before_a_command_has_begun_is_no_success_and_no_error_of_it(
    command: str, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now(*_arguments: object, **_options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(begins, now)

    told = CliRunner().invoke(main, command.split())

    assert (told.exit_code, told.output) == (130, "")


SILENT_DNS = """
import os, signal, socket, time
def getaddrinfo(*_, **__):
    print("asked", flush=True)
    os.kill(os.getpid(), signal.SIGINT)  # as it is asked: on a busy machine another process would come too late
    time.sleep(600)
socket.getaddrinfo = getaddrinfo
from pointsman_cli.main import main
main()
"""


@pytest.mark.parametrize("command", ["fleet", "tap", "doctor", "drain x", "keys list", "tenants show"])
def test_ctrl_c_does_not_wait_for_a_name_that_no_dns_answers(command: str) -> None:
    arguments = [sys.executable, "-c", SILENT_DNS, *command.split(), "--from", "nats://nats.nowhere.example:4222"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"asked\n"
            assert process.wait(60) in (0, 130, 1)
        finally:
            process.kill()
