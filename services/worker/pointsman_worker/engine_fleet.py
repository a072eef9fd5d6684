"""All engines that the worker follows: merges the lists of the sources and starts, updates and ends a FollowedEngine for
each target. An engine that no source names any more gets no new requests, and leaves after VANISHED_SECONDS."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import structlog

from pointsman.adapters.discovery.listed import ListedEngines
from pointsman.adapters.discovery.targets import TARGETS_MAX, TargetError, first_of
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import note_failure
from pointsman.runtime.engine_series import EngineSeries
from pointsman.runtime.engine_urls import EngineUrls
from pointsman_worker.followed_engine import VANISHED, FollowedEngine, WorkerContext
from pointsman_worker.service import RESTART_WALL_SECONDS
from pointsman_worker.targets import completed_targets, refused_url

log = structlog.get_logger()

VANISHED_SECONDS: WallSeconds = WallSeconds(10.0)
TICK_SECONDS: WallSeconds = WallSeconds(1.0)
SOURCE_RESTART_SECONDS: WallSeconds = WallSeconds(5.0)
RESTORE_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""Of one engine: to save what is known of its cache and to take it over; 0.7 s for 40,000 blocks."""
TARGETS_PART = "targets"
STATUSES = ("serving", "not_serving", "withheld", "failed")


class EngineFleet:
    def __init__(
        self,
        context: WorkerContext,
        sources: Sequence[EngineDiscovery],
        *,
        vanished_seconds: WallSeconds = VANISHED_SECONDS,
    ) -> None:
        self._context = context
        self._sources = sources
        urls = context.settings.discover_urls
        self._allowed = EngineUrls.of(urls) if urls else None
        self._vanished_seconds = vanished_seconds
        self._lists: dict[int, list[EngineTarget]] = {}
        self._followed: dict[InstanceId, FollowedEngine] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._series = EngineSeries(context.settings.pool)
        self._group = asyncio.TaskGroup()
        self._stopping = False
        for source in sources:
            context.board.missing(source.name, "not read yet")

    async def run(self) -> None:
        """Raises SettingsError for an engine that is alone."""
        try:
            async with self._group as group:
                for number, source in enumerate(self._sources):
                    group.create_task(self._read(number, source))
                while True:
                    self._tick()
                    await self._context.clock.sleep_wall(TICK_SECONDS)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def stop(self, reason: str, *, pausing: bool) -> None:
        """Ends all at once: with InstanceLeft, or with handovers if `pausing`."""
        self._stopping = True
        staying = [engine for engine in self._followed.values() if not engine.leaving]
        back_within = RESTART_WALL_SECONDS + len(staying) * RESTORE_WALL_SECONDS if pausing else None
        for engine in staying:
            engine.stop(reason, back_within=back_within)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _read(self, number: int, source: EngineDiscovery) -> None:
        while True:
            try:
                async with aclosing(source.targets()) as lists:
                    async for targets in lists:
                        if number not in self._lists:
                            log.info("engines_listed", source=source.name, count=len(targets))
                        self._lists[number] = targets
                        self._reconcile()
                        self._note_sources()
            except Exception as error:  # noqa: BLE001 - a source ends neither the worker nor the others
                note_failure("discovery", error, source=source.name)
            await self._context.clock.sleep_wall(SOURCE_RESTART_SECONDS)

    def _reconcile(self) -> None:
        if self._stopping:
            return
        wanted = self._wanted()
        for instance, target in wanted.items():
            engine = self._followed.get(instance)
            if engine is None:
                log.info("engine_found", instance=instance, url=target.url, ready=target.ready)
                engine = self._followed[instance] = FollowedEngine(self._context, target)
                task = self._group.create_task(self._follow(engine))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if not engine.leaving:
                engine.update(target)
        for instance, engine in self._followed.items():
            if instance not in wanted:
                engine.vanish()

    async def _follow(self, engine: FollowedEngine) -> None:
        """Until it left. Only then its name may be followed anew: both would write for one instance."""
        try:
            await engine.run()
        finally:
            del self._followed[engine.instance]
        self._reconcile()

    def _wanted(self) -> dict[InstanceId, EngineTarget]:
        """One target a name and one a rank of an engine. Of several the ready one counts, then the one followed."""
        problems: list[str] = []
        candidates = sorted(self._completed(problems), key=lambda target: (not target.ready, not self._follows(target)))
        wanted: dict[InstanceId, EngineTarget] = {}
        engines: dict[tuple[str, int | None], InstanceId] = {}
        for target in candidates:
            other = target.instance if target.instance in wanted else engines.get((target.url, target.dp_rank))
            if other is not None:
                problems.append(f"{target.instance} at {target.url} is listed besides {other} at {wanted[other].url}")
            elif len(wanted) < TARGETS_MAX:
                wanted[target.instance] = target
                engines[target.url, target.dp_rank] = target.instance
            else:
                problems.append(f"more than {TARGETS_MAX} engines; {target.instance} is not followed")
        self._note(problems)
        return wanted

    def _completed(self, problems: list[str]) -> Iterator[EngineTarget]:
        for number in sorted(self._lists):
            allowed = None if isinstance(self._sources[number], ListedEngines) else self._allowed
            for target in self._lists[number]:
                try:
                    refused = refused_url(target, allowed)
                    if not refused:
                        yield from completed_targets(target, self._context.settings)
                except TargetError as error:
                    refused = str(error)
                if refused:
                    problems.append(refused)

    def _follows(self, target: EngineTarget) -> bool:
        engine = self._followed.get(target.instance)
        return engine is not None and (engine.target.url, engine.target.identity) == (target.url, target.identity)

    def _note(self, problems: list[str]) -> None:
        board = self._context.board
        if problems:
            board.degraded(TARGETS_PART, first_of(problems))
        else:
            board.restored(TARGETS_PART)

    def _note_sources(self) -> None:
        board = self._context.board
        for number, source in enumerate(self._sources):
            if number not in self._lists:
                board.missing(source.name, source.problem or "not read yet")
            elif source.problem:
                board.degraded(source.name, source.problem)
            else:
                board.restored(source.name)

    def _tick(self) -> None:
        now = self._context.clock.wall()
        self._note_sources()
        statuses = dict.fromkeys(STATUSES, 0)
        for instance, engine in self._followed.items():
            engine.check()
            statuses[engine.status] += 1
            absent = engine.vanished_at is not None and now - engine.vanished_at >= self._vanished_seconds
            if absent and not engine.leaving:
                log.info("engine_gone", instance=instance)
                engine.stop(VANISHED)
        self._series.update(self._followed, now)
        for status, count in statuses.items():
            telemetry.WORKER_ENGINES.labels(self._context.settings.pool, status).set(count)
