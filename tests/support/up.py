"""`pointsman up` run as people run it: a process of its own, spoken to by signals, listened to line by line."""

import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pointsman.adapters.tcp_ports import free_ports
from pointsman_cli.up.addresses import EngineAddress
from pointsman_cli.up.plan import FleetPlan, ports_needed
from pointsman_cli.up.runner import STOP_SECONDS_MAX
from pointsman_cli.up.settings import UpSettings, further_pools

START_SECONDS_MAX = 180.0
POINTSMAN = str(Path(sysconfig.get_path("scripts")) / "pointsman")
POINTSMAN_LAB = f"{POINTSMAN}-lab"
OUTSIDER = "outsider"
"""Name of a test's own connection to the bus that tries what it may not."""


def plan_of(settings: UpSettings, *engines: EngineAddress) -> FleetPlan:
    """What `pointsman up` would start, with nothing looked up on this machine. `engines`: those that are joined."""
    further = further_pools(settings)
    return FleetPlan(
        settings=settings,
        data=Path("/data"),
        nats="nats://127.0.0.1:1",
        nats_port=1,
        model="m",
        secret="s",
        secret_file=Path("/data/secret"),
        config=None,
        config_policy="pointsman",
        runtime=Path("/run/p"),
        ports=tuple(range(ports_needed(settings, len(engines), further))),
        engines=engines,
        further=tuple(further),
    )


class RunningUp:
    """A `pointsman up` whose output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, data: Path, port: int) -> None:
        self.process = process
        self.data = data
        self.port = port
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def url(self) -> str:
        """Of the ingress."""
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, pattern: str, seconds: float = START_SECONDS_MAX) -> re.Match[str]:
        """Wait until the output matches; fails with the output when it does not in time or the process ended."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output)):
            ended = self.process.poll() is not None
            assert not ended, f"pointsman up ended without saying '{pattern}':\n{self.output}"
            assert time.monotonic() < deadline, f"no '{pattern}' within {seconds} s:\n{self.output}"
            time.sleep(0.05)
        return found

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send the signal and wait for the end."""
        self.process.send_signal(number)
        self.process.wait(STOP_SECONDS_MAX)


@contextmanager
def pointsman_up(directory: Path, *arguments: str) -> Iterator[RunningUp]:
    """Run `pointsman up` with a data directory, a state home and a port of its own; it has ended afterwards. It has a
    console only with `--console`."""
    data, output = directory / "data", directory / "output.txt"
    port = free_ports(1)[0]
    usual = ["--data", str(data), "--port", str(port), "--no-console"]
    usual += ["--start-seconds-max", "900"]  # the bound is that of `wait_for`
    command = [POINTSMAN, "up", *usual, *arguments]
    with tempfile.TemporaryDirectory(prefix="pm-") as sockets, output.open("wb") as sink:
        environment = os.environ | {"XDG_STATE_HOME": str(directory / "state"), "TMPDIR": sockets, "COLUMNS": "200"}
        process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=environment)
        try:
            yield RunningUp(process, output, data, port)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert_nothing_was_refused(data)


def assert_nothing_was_refused(data: Path) -> None:
    """Each process had the rights that it needed. A test's OUTSIDER has none."""
    log = data / "nats" / "nats-server.log"
    lines = log.read_text().splitlines() if log.exists() else []
    refused = [line for line in lines if "Violation" in line and f':{OUTSIDER}"' not in line]
    assert refused == []
