"""`pointsman console` as a process of its own, spoken to by HTTP."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pointsman.adapters.tcp_ports import free_ports
from tests.support.up import POINTSMAN

START_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 12.0


class RunningConsole:
    def __init__(self, process: subprocess.Popen[bytes], url: str, output: Path) -> None:
        self.process = process
        self.url = url
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def api(self, path: str) -> Any:
        """What the API answers at `/api/PATH`."""
        with urllib.request.urlopen(f"{self.url}/api/{path}", timeout=10) as answer:
            return json.load(answer)

    def wait_until_shown(self, *, health: str, seconds: float = START_SECONDS_MAX) -> None:
        """Until the console has read what there is to read: `live` or `recorded`."""
        deadline = time.monotonic() + seconds
        shown = ""
        while shown != health:
            assert self.process.poll() is None, f"the console ended:\n{self.output}"
            assert time.monotonic() < deadline, f"'{shown}' and not '{health}' after {seconds} s:\n{self.output}"
            try:
                shown = self.api("status")["health"]
            except (urllib.error.URLError, OSError) as error:
                shown = str(error)
            time.sleep(0.05)


@contextmanager
def running_console(
    directory: Path, *arguments: str, health: str, port: int = 0, environment: dict[str, str] | None = None
) -> Iterator[RunningConsole]:
    """It shows what it was given when this begins, and has ended when this ends."""
    port = port or free_ports(1)[0]
    output = directory / f"console-{port}.txt"
    command = [POINTSMAN, "console", *arguments, "--port", str(port)]
    surroundings = os.environ | {"XDG_STATE_HOME": str(directory / "state"), "COLUMNS": "200"} | (environment or {})
    with output.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, env=surroundings)
        console = RunningConsole(process, f"http://127.0.0.1:{port}", output)
        try:
            console.wait_until_shown(health=health)
            yield console
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
