"""The process that takes checkpoints is started beside its scheduler, which goes on without one."""

import subprocess
import sys
from typing import Any

import pytest
from typing_extensions import override

from pointsman.adapters.child_process import spawn
from pointsman.adapters.clocks import ScaledClock
from pointsman.primitives import WallSeconds
from pointsman.runtime.supervision import Supervisor
from pointsman_scheduler import checkpointer
from pointsman_scheduler.checkpointer import RESTART_WALL_SECONDS, running_beside
from pointsman_scheduler.settings import SchedulerSettings
from tests.support.waiting import eventually


class Waits(ScaledClock):
    """Notes how long was waited, and waits a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[WallSeconds] = []

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        self.seconds.append(seconds)
        await super().sleep_wall(WallSeconds(0.01))


async def test_a_scheduler_that_cannot_fork_goes_on_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [BlockingIOError(11, "Resource temporarily unavailable"), OSError(12, "Cannot allocate memory")]
    started: list[subprocess.Popen[bytes]] = []

    def spawned(_command: list[str], **_options: Any) -> subprocess.Popen[bytes]:
        if failures:
            raise failures.pop()
        started.append(spawn([sys.executable, "-c", "input()"]))
        return started[-1]

    monkeypatch.setattr(checkpointer, "spawn", spawned)
    clock = Waits()
    async with Supervisor() as supervisor:
        with running_beside(SchedulerSettings(), supervisor, clock):
            await eventually(lambda: bool(started))
            assert not supervisor.stopping
    assert clock.seconds[:2] == [RESTART_WALL_SECONDS] * 2
