"""The worker: tasks for KV events, HTTP polls, resync commands, heartbeats and log writes around one SessionState."""

import asyncio

import structlog

from pointsman.adapters.calibration_file import Calibration
from pointsman.ports import Clock, EngineTarget, Link
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_worker.engine_monitor import Engine, EngineMonitor
from pointsman_worker.fleet_events import FleetEvents
from pointsman_worker.follower import Follower
from pointsman_worker.heartbeats import Heartbeats
from pointsman_worker.resync import ResyncHandler
from pointsman_worker.saved_session import SessionStore
from pointsman_worker.session import UNCONFIRMED_WALL_SECONDS, EventSource, SessionState
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import completed
from pointsman_worker.writer import LogWriter

log = structlog.get_logger()

LEAVE_SECONDS_MAX = 1.5
RESTART_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""Of a worker with one engine; Python starts slowly."""
NOT_READY = "its source says that it is not ready"


class WorkerService:
    def __init__(
        self,
        *,
        link: Link,
        clock: Clock,
        board: HealthBoard,
        settings: WorkerSettings,
        target: EngineTarget,
        engine: Engine,
        events: EventSource | None,
        calibration: Calibration | None = None,
        unconfirmed_wall_seconds: WallSeconds = UNCONFIRMED_WALL_SECONDS,
        turns: asyncio.Lock | None = None,
    ) -> None:
        """`events` None: the engine publishes none. `calibration` None: the profile's costs. `turns`: of the engines of
        one worker, to restore saved caches. Raises TargetError."""
        target = completed(target, settings)
        self.state = state = SessionState(target, settings, clock, events, unconfirmed_wall_seconds)
        state.withhold("" if target.ready else NOT_READY)
        self._monitor = EngineMonitor(engine, state, board)
        fleet_events = FleetEvents(state, self._monitor, calibration)
        session_store = SessionStore(fleet_events, turns)
        self._follower = Follower(state, self._monitor, session_store)
        self._heartbeats = Heartbeats(link.commands, state, board)
        self._writer = LogWriter(link.log, state, fleet_events, session_store, board, self._heartbeats)
        self._resync = ResyncHandler(link.commands, state, self._writer)
        self._running: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Raises SettingsError if settings and engine contradict each other."""
        self._running = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                others = [
                    group.create_task(part.run())
                    for part in (self._follower, self._monitor, self._resync, self._heartbeats)
                ]
                await self._writer.run()
                for task in others:
                    task.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._stopped.set()

    async def pause(
        self, seconds_max: float = LEAVE_SECONDS_MAX, back_within: WallSeconds = RESTART_WALL_SECONDS
    ) -> None:
        """Flush, save a handover and end `run`; the instance stays in the fleet, unsuspected for `back_within`."""
        self._writer.leave("worker paused", back_within=back_within)
        await self._end(seconds_max)

    async def leave(self, reason: str, seconds_max: float = LEAVE_SECONDS_MAX) -> None:
        """Flush, append InstanceLeft and end `run`."""
        self._writer.leave(reason)
        await self._end(seconds_max)

    async def _end(self, seconds_max: float) -> None:
        if self._running is None:
            return
        try:
            async with asyncio.timeout(seconds_max):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("leave_unconfirmed", instance=self.state.instance, reason="the log did not confirm in time")
            self._running.cancel()
            await self._stopped.wait()
