"""A fresh fleet for each variant, so that no run finds what another left in the caches or in the log."""

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from pointsman.adapters.child_process import spawn
from pointsman.policies.rebalancing import REBALANCING_POLICIES
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman_cli.discovery import FleetFile, NoFleetError, find_fleet
from pointsman_cli.up.runner import STOP_SECONDS_MAX
from pointsman_cli.up.scripts import console_script

START_SECONDS_MAX = 90.0
REAL_START_SECONDS_MAX = 1000.0
"""Of fleets with real engines; `pointsman up` gives up first, with better words."""
POLL_SECONDS = 0.1
OUTPUT_LINES_SHOWN = 15


class FleetStartError(click.ClickException):
    """A fleet for the comparison did not come up; the message ends with what it last printed."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a fleet of a comparison is told: a routing policy, and a rebalancing policy where one was named."""

    policy: str
    rebalancing: str = ""

    @classmethod
    def named(cls, text: str) -> "Variant":
        """`POLICY` or `POLICY+REBALANCING`. Raises click.BadParameter."""
        policy, _, rebalancing = (part.strip() for part in text.partition("+"))
        for kind, name, known in (
            ("policy", policy, ROUTING_POLICIES),
            ("rebalancing policy", rebalancing, REBALANCING_POLICIES),
        ):
            if name not in known and (name or kind == "policy"):
                msg = f"unknown {kind} {name}; there are: {', '.join(sorted(known))}"
                raise click.BadParameter(msg, param_hint="--compare")
        return cls(policy, rebalancing)

    @property
    def label(self) -> str:
        return f"{self.policy}+{self.rebalancing}" if self.rebalancing else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshFleets:
    """What the fleets of a comparison have in common. `arguments` go to `pointsman up` as they are; `start_seconds_max`
    is how long one may take to be ready; `directory`, where one is given, is where a fleet's data and output stay, for
    one fleet."""

    engines: int
    speed: float
    arguments: Sequence[str] = ()
    start_seconds_max: float = START_SECONDS_MAX
    directory: Path | None = None

    @asynccontextmanager
    async def running(self, variant: Variant) -> AsyncIterator[FleetFile]:
        """A fleet of this variant, from ready to stopped; its data goes with it. Raises FleetStartError."""
        with self._place() as directory:
            data = directory / "data"
            output = directory / "up.log"
            process = self._start(variant, data, output)
            try:
                yield await _ready(process, data, output, self.start_seconds_max)
            finally:
                await asyncio.shield(_stopped(process))

    @contextmanager
    def _place(self) -> Iterator[Path]:
        if self.directory is not None:
            yield self.directory
            return
        with tempfile.TemporaryDirectory(prefix="pointsman-bench-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    def _start(self, variant: Variant, data: Path, output: Path) -> "subprocess.Popen[bytes]":
        own = {
            "policy": variant.policy,
            "engines": self.engines,
            "speed": self.speed,
            "port": 0,
            "data": data,
        }
        if variant.rebalancing:
            own["rebalance"] = variant.rebalancing
        flags = [text for name, value in own.items() for text in (f"--{name}", str(value))]
        output.unlink(missing_ok=True)
        return spawn([str(console_script("pointsman")), "up", *flags, *self.arguments], output=output)


async def _ready(process: "subprocess.Popen[bytes]", data: Path, output: Path, seconds_max: float) -> FleetFile:
    """Wait until the fleet has announced itself, which it does when all of it answers."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if process.poll() is not None:
            msg = f"the fleet ended while it started (exit code {process.returncode}):\n{_last_lines(output)}"
            raise FleetStartError(msg)
        try:
            return find_fleet(data=data)
        except NoFleetError:
            await asyncio.sleep(POLL_SECONDS)
    msg = f"the fleet was not ready within {seconds_max:.0f} s:\n{_last_lines(output)}"
    raise FleetStartError(msg)


async def _stopped(process: "subprocess.Popen[bytes]") -> None:
    """Ask the fleet to stop and wait for it; kill it when it takes too long."""
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
