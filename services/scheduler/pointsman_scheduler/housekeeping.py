"""Periodic work of the leader: suspects and ejects instances, ends lost requests, updates readiness and gauges."""

from collections.abc import Awaitable, Callable, Iterator

import structlog

from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceEjected,
    InstanceRoleChanged,
    InstanceUnejected,
    LivenessTimeouts,
)
from pointsman.contracts.reasons import CancelCause
from pointsman.policies.large_pool import prepare_columns
from pointsman.policies.lost_requests import seconds_since
from pointsman.primitives import WallSeconds, engine_seconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import contained
from pointsman.runtime.engine_series import EngineSeries
from pointsman.state.state import State
from pointsman.state.workload import UNGRANTED, Request
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.fleet_status import FleetGauges
from pointsman_scheduler.leader import ActiveTerm, Candidacy
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.overload import Overload
from pointsman_scheduler.replica import Replica

log = structlog.get_logger()

PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(0.25)
INSTANCES_A_TURN = 128
"""Of a larger fleet, what looks at all instances or requests for more than their silence happens less often, so that
its share of the time does not grow."""
SUSPENDED_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""A longer sleep, or a larger step of the clock, means that the process or its machine was suspended and has not read recent
entries, or that somebody set the clock: then what was heard before it seems long ago."""
LISTENING_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""How long a leader must have read the log before it ejects instances."""
ENDED_MAX = 200
"""Requests that are ended in one turn, so that the leader can renew its lease between them."""
IDLE_WALL_SECONDS: WallSeconds = WallSeconds(3.0)
"""How long an engine must report idle before its requests are ended."""


class Housekeeping:
    def __init__(
        self,
        context: SchedulerContext,
        leader: Candidacy,
        replica: Replica,
        log_liveness: LogLiveness,
        overload: Overload,
    ) -> None:
        self._leader = leader
        self._replica = replica
        self._commands = context.link.commands
        self._clock = context.clock
        self._settings = context.settings
        self._log_liveness = log_liveness
        self._pool = pool = context.pool
        self._gauges = FleetGauges(pool, context.policies)
        self._series = EngineSeries(pool)
        telemetry.ROLE_CHANGES.show_zeros(pool=pool)
        self._overload = overload

    async def run(self) -> None:
        turn, offset = 0, self._clock_offset()
        while True:
            turn += 1
            began, before = self._clock.wall(), offset
            await self._clock.sleep_wall(PERIOD_WALL_SECONDS)
            offset = self._clock_offset()
            self._note_pause(slept=self._clock.wall() - began, stepped=max(offset - before, before - offset))
            for name, step in self._steps(turn):
                with contained(name):
                    if (term := self._leader.leading) is not None:
                        await step(term)
            with contained("columns"):
                prepare_columns(self._replica.state)
            self._leader.report_readiness()
            with contained("overload"):
                self._watch_load()
            with contained("gauges"):
                self._show(self._replica.state)

    def _steps(self, turn: int) -> Iterator[tuple[telemetry.Step, Callable[[ActiveTerm], Awaitable[None]]]]:
        yield "liveness", self._check_liveness
        if turn % max(1, len(self._replica.state.fleet.instances) // INSTANCES_A_TURN) == 0:
            yield "outliers", self._eject_outliers
            yield "lost requests", self._end_lost_requests

    def _note_pause(self, *, slept: WallSeconds, stepped: WallSeconds) -> None:
        """Silence counts from now on if this process could not hear: `slept` too long, its clock `stepped`, it is cut off,
        or the log is silent."""
        instances = len(self._replica.state.fleet.instances)
        if stepped > SUSPENDED_WALL_SECONDS:
            self._log_liveness.clock_was_set()
            if self._leader.term is not None:
                self._leader.term.clock_offsets.forget()
        elif (
            slept > SUSPENDED_WALL_SECONDS
            or not self._commands.connected
            or self._log_liveness.log_is_silent(instances)
        ):
            self._log_liveness.listen_from_now()

    def _clock_offset(self) -> WallSeconds:
        """Between the time in the log, which can be set, and the one of waits, which stands still with the machine."""
        return WallSeconds(self._clock.now() / self._clock.speed) - self._clock.wall()

    def _watch_load(self) -> None:
        term = self._leader.leading
        told = self._overload.look(leads=term is not None)
        if term is not None:
            for event in told:
                term.note(event)

    def _show(self, state: State) -> None:
        telemetry.LEADER.labels(self._pool).set(self._leader.leading is not None)
        telemetry.LEADER_TERM.labels(self._pool).set(state.term)
        self._gauges.show(state)
        self._series.update([instance.id for instance in state.fleet.instances], self._clock.wall())

    async def _check_liveness(self, term: ActiveTerm) -> None:
        now, speed, dispatcher = self._clock.now(), self._clock.speed, term.dispatcher
        timeouts = LivenessTimeouts(
            heard_since=self._log_liveness.listening_since,
            suspect_after=engine_seconds(self._settings.suspect_seconds, speed),
            leave_after=engine_seconds(self._settings.leave_seconds, speed),
        )
        term.heard.forget_absent(self._replica.state)
        heard = term.heard.silent_since(self._replica.state, now, self._log_liveness.steady_since)
        for event in dispatcher.check_liveness(timeouts, now, heard):
            if isinstance(event, FleetEvent):
                log.warning("instance_silent", decision=type(event).__name__, instance=event.instance)
        for event in dispatcher.change_roles(now):
            if isinstance(event, InstanceRoleChanged):
                telemetry.ROLE_CHANGES.labels(self._pool, event.role).inc()
                log.info("instance_role_changed", instance=event.instance, role=event.role, left=event.left)
        dispatcher.relocate_pending(now)  # before the grants: what can leave a draining instance is not granted there
        dispatcher.grant_everywhere(now)
        dispatcher.place_held(now)
        await term.publish()

    async def _eject_outliers(self, term: ActiveTerm) -> None:
        now = self._clock.now()
        if now - self._log_liveness.listening_since < engine_seconds(LISTENING_WALL_SECONDS, self._clock.speed):
            return
        for event in term.dispatcher.eject_outliers(now):
            if isinstance(event, InstanceEjected):
                telemetry.ENGINE_EJECTIONS.labels(self._pool, event.instance, event.cause).inc()
                log.warning("instance_ejected", instance=event.instance, cause=event.cause, detail=event.detail)
            elif isinstance(event, InstanceUnejected):
                log.info("instance_unejected", instance=event.instance, half_open=event.half_open)
        await term.publish()

    async def _end_lost_requests(self, term: ActiveTerm) -> None:
        state, lost = self._replica.state, self._lost_requests(term)
        for begin in range(0, len(lost), ENDED_MAX):
            if begin:
                await self._clock.sleep_wall(WallSeconds(0.0))
            if self._leader.leading is not term:
                return
            now = self._clock.now()
            for request, cause in lost[begin : begin + ENDED_MAX]:
                end = term.dispatcher.cancel_ungranted if request.stage in UNGRANTED else term.dispatcher.cancel_any
                end(request.id, cause, now)
            if begin + ENDED_MAX >= len(lost):
                term.dispatcher.grant_everywhere(now)
            await term.publish()
        term.waiters.forget_absent()
        if term.spans is not None:
            term.spans.end_absent(state.workload.requests)

    def _lost_requests(self, term: ActiveTerm) -> list[tuple[Request, CancelCause]]:
        now, speed, state = self._clock.now(), self._clock.speed, self._replica.state
        lost = [(request, CancelCause.INGRESS_SILENT) for request in self._orphans(term)]
        idle_after, steady_since = engine_seconds(IDLE_WALL_SECONDS, speed), self._log_liveness.steady_since
        idle = term.lost.find(state, term.heard, now, steady_since=steady_since, idle_after=idle_after)
        lost += [(request, CancelCause.ENGINE_IDLE) for request in idle]
        longest = engine_seconds(self._settings.request_seconds_max, speed)
        for request in state.workload.requests.values():
            granted = request.stage not in UNGRANTED
            if granted and seconds_since(request.granted_at, now, steady_since=steady_since) > longest:
                lost.append((request, CancelCause.NEVER_ENDED))
        return lost

    def _orphans(self, term: ActiveTerm) -> list[Request]:
        """Older ingresses name only waiting requests, and none that was redispatched."""
        silent = term.ownership.orphans(
            self._replica.state.workload.requests.values(),
            self._clock.wall(),
            since=self._log_liveness.listening_since_wall,
            silence_max=self._settings.waiter_seconds,
        )
        return [r for r in silent if r.followed or (r.stage in UNGRANTED and not r.rebound_from)]
