"""The scheduler: follows the log, decides while it leads, and writes every decision. Three tasks share one event loop:
fold, candidacy with command handlers, housekeeping; none awaits while it changes the State. A decision is applied at
once, then answered, then written. After losing its term or writes, a leader discards its State and follows again from a
checkpoint."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, WritesLost
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceLeft, InstanceReported
from pointsman.contracts.requests import RequestEvent
from pointsman.policies.dispatch import Dispatcher
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId
from pointsman.runtime.containment import contained
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.log_metrics import measure_log
from pointsman.runtime.recovery import LogBrokenError, Recovery, RestoredState
from pointsman.runtime.supervision import Supervisor
from pointsman.state.state import State
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.engine_url_guard import EngineUrlGuard
from pointsman_scheduler.fleet_status import FleetWarnings
from pointsman_scheduler.handlers import CommandHandlers
from pointsman_scheduler.housekeeping import Housekeeping
from pointsman_scheduler.leader import LEADERSHIP, ActiveTerm, Candidacy, DeposedError
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.overlap import OverlapService
from pointsman_scheduler.overload import Overload
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.resync import Resync
from pointsman_scheduler.tenant_policies import TenantPoliciesKeeper

log = structlog.get_logger()


def start_scheduler(supervisor: Supervisor, context: SchedulerContext) -> "SchedulerService":
    """With all tasks started."""
    service = SchedulerService(context)
    supervisor.start(service.run(), name="term")
    for task, work in service.background().items():
        supervisor.start(work, name=task)
    return service


class SchedulerService:
    def __init__(self, context: SchedulerContext) -> None:
        """Its parts are made in the order in which they need each other."""
        settings, policies, link = context.settings, context.policies, context.link
        pool, clock, board = context.pool, context.clock, context.board
        self.context, self.clock, self.board = context, clock, board
        self.recovery = Recovery(
            event_log=link.log,
            checkpoints=link.checkpoints,
            clock=clock,
            board=board,
            part=LEADERSHIP,
            empty_state=lambda: settings.empty_state(policies),
        )
        self.replica = replica = Replica(settings.empty_state(policies), pool)
        self.log_liveness = LogLiveness(clock, suspect_seconds=settings.suspect_seconds)
        self.leader = leader = Candidacy(context, replica, self.log_liveness)
        overload = Overload(link.log, clock, board, context.name)
        self.tenants = TenantPoliciesKeeper(leader=leader, replica=replica, store=link.access, clock=clock)
        self.handlers = CommandHandlers(context, leader, replica, self.tenants, self.log_liveness, overload)
        self.housekeeping = Housekeeping(context, leader, replica, self.log_liveness, overload)
        self.url_guard = EngineUrlGuard(EngineUrls.of(settings.engine_urls))
        self.resync = Resync(
            leader=leader,
            replica=replica,
            commands=link.commands,
            clock=clock,
            pool=pool,
            is_refused=self.url_guard.is_refused,
        )
        self.overlap = OverlapService(
            replica=replica,
            leader=leader,
            event_log=link.log,
            clock=clock,
            pool=pool,
            name=context.name,
            secret=settings.secret,
        )
        self.warnings = FleetWarnings()
        board.missing(LEADERSHIP, "folding the log")

    @property
    def state(self) -> State:
        return self.replica.state

    @property
    def checkpoint_form(self) -> str:
        """Of checkpoints that it can begin with."""
        return self.recovery.form

    @property
    def leading(self) -> ActiveTerm | None:
        return self.leader.leading

    @property
    def dispatcher(self) -> Dispatcher | None:
        return self.leader.term.dispatcher if self.leader.term is not None else None

    async def run(self) -> None:
        while True:
            self.replica.stop()
            start = await self.recovery.begin()
            try:
                async with asyncio.TaskGroup() as tasks:
                    self.replica.restart(start)
                    self.leader.reset()
                    tasks.create_task(self._fold(start), name="fold")
                    tasks.create_task(self._campaign(tasks), name="campaign")
                    tasks.create_task(self.overlap.serve(self.context.link.commands, start.end), name="overlap")
            except* (LogBrokenError, DeposedError) as ends:
                reason = str(ends.exceptions[0])
                log.warning("term_ended", reason=reason, led=self.dispatcher is not None)
                self.board.missing(LEADERSHIP, reason)
                self.leader.void_unwritten(reason)
            finally:
                await self.leader.close()

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Beside `run`, by the name of their task."""
        return {
            "housekeeping": self.housekeeping.run(),
            "resync": self.resync.run(),
            "log-metrics": measure_log(
                self.context.link.log, self.clock, self.context.pool, lambda: self.replica.state.sequence
            ),
            "tenants": self.tenants.run(),
        }

    async def resign(self) -> None:
        await self.leader.resign()

    async def _campaign(self, tasks: asyncio.TaskGroup) -> None:
        leader = self.leader
        await leader.obtain_lease()
        tasks.create_task(leader.keep_lease(), name="keep-lease")
        tasks.create_task(leader.watch_reading(), name="watch-reading")
        await leader.open(self.context.link.commands, self.handlers.by_subject())
        await leader.take_office()
        with contained("tenant policies"):
            await self.tenants.enforce()
        with contained("relocation"):
            if (term := leader.leading) is not None:  # instances that joined or drained while no scheduler led
                now = self.clock.now()
                self.url_guard.refuse(term.dispatcher, now)
                term.dispatcher.repeat_roles_and_drains([i.id for i in self.state.fleet.instances], now)
                term.dispatcher.relocate_pending(now)
                await term.publish()

    async def _fold(self, start: RestoredState) -> None:
        """Raises LogBrokenError."""
        async for entry in self.recovery.entries(start):
            await self._on_entry(entry)
            self.replica.notify()

    async def _on_entry(self, entry: LogEntry) -> None:
        event = entry.event
        if event is None or self.leader.is_own(event):
            self.log_liveness.entry_read(event.stamp.number if event is not None and event.stamp is not None else 0)
            self.replica.pass_over(entry)
            return
        self.log_liveness.entry_read()
        queue, standing = self._queue_of(event), self._standing(event)
        self.replica.apply(entry)
        await self._note(event)
        term = self.leading
        if term is None:
            return
        with contained("reaction"):
            self._take_evidence(term, event)
            if standing is None or standing != self._standing(event):
                await self._react(term, event, queue)

    async def _note(self, event: LogEvent) -> None:
        """Whether this scheduler leads or follows. Raises DeposedError."""
        if isinstance(event, LeaderElected):
            self.leader.note_election(event)
        elif isinstance(event, InstanceJoined | InstanceLeft):
            with contained("key_check"):
                self.warnings.check(self.state, event.instance)
        elif isinstance(event, WritesLost) and event.writer == self.context.name and self.leader.term is not None:
            await self.leader.end_term(f"the log misses {event.count} decisions of this leader: {event.reason}")

    def _take_evidence(self, term: ActiveTerm, event: LogEvent) -> None:
        """What a leader knows beside State."""
        if isinstance(event, CacheEvent):
            term.flush_pace.event_read()
        elif isinstance(event, InstanceJoined | InstanceReported):
            term.heard.read(self.state, event, self.clock.now())
            if isinstance(event, InstanceReported):
                self.resync.note_report(event)

    def _queue_of(self, event: LogEvent) -> InstanceId | None:
        """Looked up before the event removes the request."""
        if not isinstance(event, RequestEvent):
            return None
        request = self.state.workload.requests.get(event.request)
        return request.instance if request else None

    def _standing(self, event: LogEvent) -> object:
        """Of a report: what it may change for requests that wait. Most change nothing, and looking at all queues takes
        milliseconds in a large fleet."""
        if not isinstance(event, InstanceReported):
            return None
        fleet = self.state.fleet
        known = fleet.get(event.instance)
        return fleet.ready, known and (known.adapters, known.aliases)

    async def _react(self, term: ActiveTerm, event: LogEvent, queue: InstanceId | None) -> None:
        """Decides what the event has made possible. `queue`: where its request was pending or inside."""
        now = self.clock.now()
        if queue:
            term.dispatcher.grant_waiting(queue, now)
        elif isinstance(event, FleetEvent):
            if isinstance(event, InstanceJoined):
                self.url_guard.refuse(term.dispatcher, now)
                term.dispatcher.repeat_roles_and_drains([event.instance], now)
            term.dispatcher.relocate_pending(now)
            term.dispatcher.place_held(now)
        else:
            return
        await term.publish()
