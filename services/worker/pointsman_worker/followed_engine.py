"""One engine that the worker follows, from its first target until no source names it: starts a WorkerService, ends it
when another engine takes its place, and starts it again when it failed."""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import structlog
from typing_extensions import override

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.calibration_file import Calibration
from pointsman.adapters.waiting import wait_at_most
from pointsman.contracts.codec import UnwritableError
from pointsman.contracts.fleet import InstanceLeft
from pointsman.ports import Clock, EngineTarget, Link, LogUnavailableError
from pointsman.primitives import Epoch, InstanceId, WallSeconds
from pointsman.runtime.containment import note_failure
from pointsman.runtime.health import HealthBoard
from pointsman_worker.engine_monitor import Engine
from pointsman_worker.service import NOT_READY, WorkerService
from pointsman_worker.session import EventSource
from pointsman_worker.settings import SettingsError, WorkerSettings

log = structlog.get_logger()

FOLLOWING_PART = "following"
TARGET_PART = "target"
RESTART_SECONDS: WallSeconds = WallSeconds(1.0)
RESTART_SECONDS_MAX: WallSeconds = WallSeconds(30.0)
REPLACED_SECONDS_MAX = 30.0
"""For InstanceLeft to reach the log; then the leader removes the silent instance."""
PAUSE_SECONDS_MAX = 20.0
"""64 caches of 40,000 blocks are saved in 10 s."""
LEAVE_SECONDS_MAX = 6.0
VANISHED = "no source names it any more"


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What all engines of a worker share. `alone`: the only engine that will ever be followed; its failure is the
    worker's."""

    link: Link
    clock: Clock
    board: HealthBoard
    settings: WorkerSettings
    calibration: Calibration | None
    open_engine: Callable[[EngineTarget], AbstractAsyncContextManager[Engine]]
    open_events: Callable[[EngineTarget], EventSource | None]
    alone: bool = False
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)


class FollowedEngine:
    def __init__(self, context: WorkerContext, target: EngineTarget) -> None:
        """`target`: completed."""
        self.instance: InstanceId = target.instance
        self.target = target
        self.vanished_at: WallSeconds | None = None
        self._context = context
        self._health = EngineHealth(context.board, target.instance)
        self._board = context.board if context.alone else self._health
        self._service: WorkerService | None = None
        self._change = asyncio.Event()
        self._stopping = ""
        self._back_within: WallSeconds | None = None
        self._last_epoch = self._joined_epoch = Epoch(0)

    @property
    def leaving(self) -> bool:
        return bool(self._stopping)

    @property
    def status(self) -> str:
        if self._service is None:
            return "failed"
        if self._service.state.withheld:
            return "withheld"
        return "serving" if self._service.state.serving else "not_serving"

    def check(self) -> None:
        """Called regularly."""
        if self._service is not None and self._service.state.session is not None:
            self._board.restored(FOLLOWING_PART)

    def update(self, target: EngineTarget) -> None:
        """Anything but `ready` changes: another engine."""
        self.vanished_at = None
        before, self.target = self.target, target
        if replace(target, ready=before.ready) != before:
            log.info("engine_replaced", instance=self.instance, url=target.url, identity=target.identity)
            self._change.set()
        self._withhold("" if target.ready else NOT_READY)

    def vanish(self) -> None:
        """Nothing is placed there from now on."""
        if self.vanished_at is None:
            self.vanished_at = self._context.clock.wall()
            self._withhold(VANISHED)

    def stop(self, reason: str, *, back_within: WallSeconds | None = None) -> None:
        """Ends `run`: with InstanceLeft, or with a handover for a successor that is `back_within`."""
        self._stopping, self._back_within = reason, back_within
        self._change.set()

    async def run(self) -> None:
        """Raises SettingsError and what is unexpected only if the engine is `alone`."""
        structlog.contextvars.bind_contextvars(instance=self.instance)
        clock, backoff = self._context.clock, Backoff(RESTART_SECONDS, RESTART_SECONDS_MAX)
        try:
            while not self._stopping:
                self._change.clear()
                began = clock.wall()
                try:
                    await self._follow(self.target)
                except Exception as error:
                    if self._context.alone:
                        raise
                    self._note(error)
                    if clock.wall() - began > RESTART_SECONDS_MAX:
                        backoff.reset()
                    await wait_at_most(self._change, backoff.next_wait())
            if self._back_within is None:
                await self._leave()
        finally:
            self._health.close()

    async def _follow(self, target: EngineTarget) -> None:
        """Until it is stopped or replaced. Raises what the service raises."""
        context = self._context
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(context.open_engine(target))
            service = WorkerService(
                link=context.link,
                clock=context.clock,
                board=self._board,
                settings=context.settings,
                target=target,
                engine=engine,
                events=context.open_events(target),
                calibration=context.calibration,
                turns=context.turns,
            )
            service.state.last_epoch, service.state.joined_epoch = self._last_epoch, self._joined_epoch
            if self.vanished_at is not None:
                service.state.withhold(VANISHED)
            try:
                async with asyncio.TaskGroup() as group:
                    self._service = service
                    group.create_task(service.run())  # it ends by itself only with an error, which ends the group
                    await self._change.wait()
                    await self._end(service)
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from failures
            finally:
                self._service = None
                self._last_epoch, self._joined_epoch = service.state.last_epoch, service.state.joined_epoch

    async def _end(self, service: WorkerService) -> None:
        if self._back_within is not None:
            await service.pause(PAUSE_SECONDS_MAX, self._back_within)
        elif self._stopping:
            await service.leave(self._stopping)
        else:
            await service.leave("another engine took its place", REPLACED_SECONDS_MAX)

    async def _leave(self) -> None:
        """If the service could not, because it had failed or did not run."""
        if not self._joined_epoch:
            return
        left = InstanceLeft(
            at=self._context.clock.now(), instance=self.instance, epoch=self._joined_epoch, reason=self._stopping
        )
        with contextlib.suppress(LogUnavailableError, UnwritableError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS_MAX):
                await self._context.link.log.append(left)

    def _withhold(self, reason: str) -> None:
        if reason:
            self._board.degraded(TARGET_PART, reason)
        else:
            self._board.restored(TARGET_PART)
        if self._service is not None:
            self._service.state.withhold(reason)

    def _note(self, error: Exception) -> None:
        if isinstance(error, SettingsError):
            log.warning("engine_not_followed", reason=error.message)
        else:
            note_failure("engine", error, instance=self.instance)
        reason = error.message if isinstance(error, SettingsError) else f"{type(error).__name__}: {error}"
        self._board.missing(FOLLOWING_PART, reason[:500])


class EngineHealth(HealthBoard):
    """Parts of `board` that are named after the instance; `close` takes them away."""

    def __init__(self, board: HealthBoard, instance: InstanceId) -> None:
        super().__init__(pool=board.pool, of=instance)
        self._board = board

    @override
    def missing(self, part: str, reason: str) -> None:
        self.degraded(part, reason)

    @override
    def degraded(self, part: str, reason: str) -> None:
        self._parts.setdefault(part)
        self._board.degraded(self._named(part), reason)

    @override
    def restored(self, part: str) -> None:
        if part in self._parts:
            self._board.restored(self._named(part))

    def close(self) -> None:
        for part in self.parts:
            self._board.forget(self._named(part))
