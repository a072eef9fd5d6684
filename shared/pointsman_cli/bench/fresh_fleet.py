"""A fresh fleet by `pointsman up` while a context is open. Its data is removed afterwards."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from pointsman.adapters.child_process import spawn
from pointsman.runtime.environment_names import given_settings
from pointsman.runtime.settings import CONFIG, FleetSettings
from pointsman_cli.discovery import FleetFile, NoFleetError, find_fleet
from pointsman_cli.terminal import SeveralLinesError
from pointsman_cli.up.runner import STOP_SECONDS_MAX
from pointsman_cli.up.scripts import console_script
from pointsman_cli.up.settings import UpSettings

START_SECONDS_MAX = 90.0
REAL_START_SECONDS_MAX = 1000.0
"""For fleets with real engines. `pointsman up` gives up first, with a better message."""
POLL_SECONDS = 0.1
OUTPUT_LINES_SHOWN = 15
LOG_SETTINGS = "log_"


class FleetStartError(SeveralLinesError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshFleet:
    """`settings`: SERVICE.NAME=VALUE each. `arguments`: further ones of `pointsman up`. `directory`: for data and
    output; temporary by default."""

    policy: str
    instances: int | str
    speed: float
    rebalance: str = ""
    offloading_gib: float | None = None
    """Host memory of each engine for KV blocks; None: the engine's default."""
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    start_seconds_max: float = START_SECONDS_MAX
    directory: Path | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FleetFile]:
        with self._place() as directory:
            data, output = directory / "data", directory / "up.log"
            process = self._start(data, output)
            try:
                yield await _ready(process, data, output, self.start_seconds_max)
            finally:
                await asyncio.shield(_stopped(process))

    @contextmanager
    def _place(self) -> Iterator[Path]:
        if self.directory is not None:
            yield self.directory
            return
        with tempfile.TemporaryDirectory(prefix="pointsman-fleet-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    def _start(self, data: Path, output: Path) -> "subprocess.Popen[bytes]":
        flags = {"policy": self.policy, "instances": self.instances, "speed": self.speed, "port": 0, "data": data}
        arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        rebalance = [f"rebalancer.rebalance={self.rebalance}"] if self.rebalance else []
        arguments += [text for setting in (*rebalance, *self.settings) for text in ("--set", setting)]
        if self.offloading_gib:
            arguments += ["--engine-args", f"--kv-offloading-size {self.offloading_gib}"]
        output.unlink(missing_ok=True)
        return spawn(
            [str(console_script("pointsman")), "up", "--no-console", *arguments, *self.arguments],
            output=output,
            environment={**_of_no_fleet(os.environ), **self.environment},
        )


def _of_no_fleet(outer: Mapping[str, str]) -> dict[str, str]:
    """Without the settings of `pointsman up` and of a fleet, which may name another one, except how it logs. What services
    and the engines' plug-in read stays."""
    chosen = {
        one.name for one in (*fields(UpSettings), *fields(FleetSettings)) if not one.name.startswith(LOG_SETTINGS)
    }
    given = given_settings(outer)
    return {variable: value for variable, value in outer.items() if given.get(variable) not in {CONFIG, *chosen}}


async def _ready(process: "subprocess.Popen[bytes]", data: Path, output: Path, seconds_max: float) -> FleetFile:
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FleetStartError(
                f"the fleet ended while it started (exit code {process.returncode}):\n{_last_lines(output)}"
            )
        try:
            return find_fleet(data=data)
        except NoFleetError:
            await asyncio.sleep(POLL_SECONDS)
    raise FleetStartError(f"the fleet was not ready within {seconds_max:.0f} s:\n{_last_lines(output)}")


async def _stopped(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
        await asyncio.sleep(POLL_SECONDS)


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-OUTPUT_LINES_SHOWN:])
