"""Process that takes checkpoints: `python -m pointsman_scheduler.checkpointer`, started and restarted by its scheduler,
with the same settings. Low priority, no port."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from random import SystemRandom

import structlog

from pointsman.adapters.child_process import spawn
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import Clock, Link
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.recovery import Recovery
from pointsman.runtime.settings import command, environment
from pointsman.runtime.structured_logs import configure_logging
from pointsman.runtime.supervision import Supervisor, run
from pointsman_scheduler.checkpointing import Cadence, Checkpointer
from pointsman_scheduler.settings import SchedulerSettings

log = structlog.get_logger()

NICENESS = 15
WATCH_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
RESTART_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
SPREAD_MAX = 1.3
READS_EVERY_WALL_SECONDS: WallSeconds = WallSeconds(0.25)


@contextmanager
def running_beside(settings: SchedulerSettings, supervisor: Supervisor, clock: Clock) -> Iterator[None]:
    child = _Child(settings)
    supervisor.start(child.keep_running(clock), name="checkpointer")
    try:
        yield
    finally:
        child.stop()


class _Child:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._environment = os.environ | environment(asdict(settings))
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = asyncio.Event()

    async def keep_running(self, clock: Clock) -> None:
        while not self._stopped.is_set():
            try:
                self._process = self._start()
            except OSError as error:  # no process or memory is free
                log.warning("checkpointer_not_started", problem=str(error), again_in=RESTART_WALL_SECONDS)
            else:
                await self._until_ended(self._process, clock)
            await clock.sleep_wall(RESTART_WALL_SECONDS)

    async def _until_ended(self, process: subprocess.Popen[bytes], clock: Clock) -> None:
        while (code := process.poll()) is None:
            await clock.sleep_wall(WATCH_WALL_SECONDS)
        if not self._stopped.is_set():
            log.warning("checkpointer_ended", code=code, again_in=RESTART_WALL_SECONDS)

    def stop(self) -> None:
        """Kills it: an incomplete checkpoint is ignored."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-m", "pointsman_scheduler.checkpointer"], environment=self._environment)


@command(SchedulerSettings, name="pointsman-checkpointer", table="scheduler")
def main(settings: SchedulerSettings) -> None:
    """Take checkpoints of the fold, for a scheduler that starts later. Started by its scheduler."""
    os.nice(NICENESS)
    configure_logging(settings.log_level, settings.log_format)
    run(lambda supervisor: _serve(settings, supervisor))


async def _serve(settings: SchedulerSettings, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard()
    cadence = Cadence(seconds=settings.checkpoint_seconds, spread=SystemRandom().uniform(1.0, SPREAD_MAX))
    async with open_link(
        settings,
        clock,
        board,
        name="checkpointer",
        user=BusUser(BusRole.SCHEDULER),
        reads_every=READS_EVERY_WALL_SECONDS,
    ) as link:
        checkpointer = checkpointer_over(link, settings, clock=clock, board=board, cadence=cadence)
        supervisor.start(checkpointer.run(), name="checkpoints")
        await supervisor.until_stopped()


def checkpointer_over(
    link: Link, settings: SchedulerSettings, *, clock: Clock, board: HealthBoard, cadence: Cadence
) -> Checkpointer:
    policies = settings.policies()
    following = Recovery(
        event_log=link.log,
        checkpoints=link.checkpoints,
        clock=clock,
        board=board,
        part="fold",
        empty_state=lambda: settings.empty_state(policies),
    )
    return Checkpointer(
        event_log=link.log,
        checkpoints=link.checkpoints,
        following=following,
        clock=clock,
        cadence=cadence,
    )


if __name__ == "__main__":
    main()
