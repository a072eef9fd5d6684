"""The scheduler: folds the log, answers `cmd.route`, grants, and writes every decision down.

Three things run side by side on one event loop, and none of them waits while it changes the state:
the *reader* folds the log; the *command handlers* let the dispatcher decide; the *housekeeper* looks after silence.
A decision is applied at once, published off the path, and only then answered. The leader passes over its own
decisions when they come back through the log.
"""

from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import structlog

from pointsman.chassis import telemetry
from pointsman.chassis.health import HealthBoard
from pointsman.chassis.log_follower import end_of_log
from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    FleetDescribed,
    ResyncCache,
    RouteGranted,
    RouteRejected,
    RouteRequest,
)
from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.requests import RequestCancelled, RequestEvent
from pointsman.contracts.subjects import cancel_subject, fleet_view_subject, resync_subject, route_subject
from pointsman.policies.dispatch import Dispatcher, PolicySet
from pointsman.ports import (
    Clock,
    CommandHandler,
    Commands,
    CommandTimeoutError,
    EventLog,
    LogEntry,
    LogReset,
    LogUnavailableError,
    NoResponderError,
    Reply,
)
from pointsman.primitives import InstanceId, PoolName, RequestId, Seconds, Sequence, Term
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request, Stage
from pointsman_scheduler.description import FleetGauges, describe_fleet
from pointsman_scheduler.settings import SchedulerSettings

log = structlog.get_logger()

LEADERSHIP = "leadership"
HOUSEKEEPING_WALL_SECONDS = 0.25
HEALING_WALL_SECONDS = 0.5
RESYNC_TIMEOUT_WALL_SECONDS = 1.0
LEADER_ANSWERS_WALL_SECONDS = 1.0
STAND_BY_WALL_SECONDS = 0.5
TAKE_OVER_RETRY_WALL_SECONDS = 0.5

UNAVAILABLE = {"no_instance", "already_ended"}
"""Refusals that are no matter of load: 503. All others are answered 429."""


Answer = tuple[Reply, RouteGranted | RouteRejected]


@dataclass(slots=True)
class Waiter:
    """An ingress that waits for an answer. `heard` is when it last asked, wall time."""

    attempt: int
    reply: Reply
    heard: Seconds


class SchedulerService:
    """One scheduler of one pool. `run` folds the log for ever and leads once it has caught up."""

    def __init__(
        self,
        *,
        event_log: EventLog,
        commands: Commands,
        clock: Clock,
        board: HealthBoard,
        settings: SchedulerSettings,
        policies: PolicySet,
        name: str,
    ) -> None:
        self._log = event_log
        self._commands = commands
        self._clock = clock
        self._board = board
        self._settings = settings
        self._policies = policies
        self._name = name
        self._pool = PoolName(settings.pool)
        self._leading = AsyncExitStack()
        self._waiters: dict[RequestId, Waiter] = {}
        self._gauges = FleetGauges()
        self._listens_since: Seconds = 0.0
        self._listens_since_wall: Seconds = 0.0
        self.state = self._empty_state()
        self.dispatcher: Dispatcher | None = None
        """Present while this scheduler leads."""
        board.missing(LEADERSHIP, "folding the log")

    async def run(self) -> None:
        """Fold, lead, serve; ends only by cancellation or failure."""
        try:
            await self._fold()
        finally:
            await self._leading.aclose()

    async def keep_house(self) -> None:
        """Look after silent workers, forgotten requests and the gauges, for ever."""
        while True:
            await self._clock.sleep_wall(HOUSEKEEPING_WALL_SECONDS)
            if not self._commands.connected:
                self._listen_from_now()
            if self.dispatcher is not None:
                await self._check_liveness(self.dispatcher)
            if self.dispatcher is not None:
                await self._check_waiters(self.dispatcher)
            self._gauges.show(self.state)

    async def heal(self) -> None:
        """Ask for a snapshot wherever the index is in doubt, for ever."""
        while True:
            await self._clock.sleep_wall(HEALING_WALL_SECONDS)
            if self.dispatcher is None:
                continue
            for instance in self.state.fleet.instances:
                if instance.doubt:
                    await self._resync(instance.id, instance.doubt)
            for stranger, heard_at in list(self.state.strangers.items()):
                if self._clock.now() - heard_at < self._settings.suspect_seconds * self._clock.speed:
                    await self._resync(stranger, "it reports, but the log does not say that it joined", rejoin=True)

    # Folding

    def _empty_state(self) -> State:
        settings = self._settings
        return State(
            PoolSettings(
                block_tokens=settings.block_tokens,
                speed=settings.speed,
                hot_share=settings.hot_share,
                cold_share=settings.cold_share,
            ),
            self._policies.memories(),
        )

    async def _fold(self) -> None:
        end = await self._end_of_log()
        if end == 0:
            await self._stand_by()
            await self._take_over()
        async for entry in self._log.read(1):
            if isinstance(entry, LogReset):
                await self._step_down(entry.reason)
                end = await self._end_of_log()
            else:
                await self._take_in(entry)
            if self.dispatcher is None and self.state.sequence >= end:
                if await self._stand_by():
                    end = await self._end_of_log()
                if self.state.sequence >= end:
                    await self._take_over()

    async def _stand_by(self) -> bool:
        """Wait while another scheduler leads this pool; whether there was one."""
        stood_by = False
        while True:
            try:
                answer = await self._commands.request(
                    fleet_view_subject(self._pool), DescribeFleet(), timeout=LEADER_ANSWERS_WALL_SECONDS
                )
            except NoResponderError:
                return stood_by
            except CommandTimeoutError:
                answer = None
            if not stood_by:
                leader = answer.scheduler if isinstance(answer, FleetDescribed) else "one that does not answer"
                log.info("standing_by", leader=leader)
                self._board.missing(LEADERSHIP, f"another scheduler leads: {leader}")
            stood_by = True
            await self._clock.sleep_wall(STAND_BY_WALL_SECONDS)

    async def _end_of_log(self) -> Sequence:
        return await end_of_log(self._log, clock=self._clock, board=self._board, part=LEADERSHIP)

    async def _take_over(self) -> None:
        """Lead from here on. The log says so before the first decision does."""
        state = self.state
        term = Term(state.term + 1)
        event = LeaderElected(
            at=self._clock.now(),
            term=term,
            scheduler=self._name,
            as_of=state.sequence,
            pool=asdict(state.settings),
        )
        while True:
            try:
                await self._log.append(event)
                break
            except LogUnavailableError as error:
                self._board.missing(LEADERSHIP, f"the log does not answer: {error}")
                await self._clock.sleep_wall(TAKE_OVER_RETRY_WALL_SECONDS)
        state.apply(event)
        self._listen_from_now()
        self.dispatcher = Dispatcher(state, self._policies, term=term)
        await self._serve(route_subject(self._pool), self._on_route)
        await self._serve(cancel_subject(self._pool), self._on_cancel)
        await self._serve(fleet_view_subject(self._pool), self._on_describe)
        self._board.restored(LEADERSHIP)
        log.info("leading", term=term, as_of=state.sequence, instances=len(state.fleet.instances))

    def _listen_from_now(self) -> None:
        """Silence before this moment says nothing about others: nobody here could hear them."""
        self._listens_since, self._listens_since_wall = self._clock.now(), self._clock.wall()

    async def _serve(self, subject: str, handler: CommandHandler) -> None:
        """Answer a command for as long as this scheduler leads; before that nobody does, and the asker knows it."""
        await self._leading.enter_async_context(self._commands.serve(subject, handler))

    async def _step_down(self, reason: str) -> None:
        self.dispatcher = None
        await self._leading.aclose()
        self.state = self._empty_state()
        self._board.missing(LEADERSHIP, reason)

    async def _take_in(self, entry: LogEntry) -> None:
        event = entry.event
        if event is None or self._is_own(event):
            self.state.skip(entry.sequence)
        else:
            touched = self._instance_of(event)
            self.state.apply(event, entry.sequence)
            if self.dispatcher is not None:
                await self._react(self.dispatcher, event, touched)

    def _is_own(self, event: LogEvent) -> bool:
        """Whether this is a decision of ours, applied when it was made, that comes back through the log."""
        return self.dispatcher is not None and event.stamp is not None and event.stamp.term == self.dispatcher.term

    def _instance_of(self, event: LogEvent) -> InstanceId | None:
        """Whose line a request event touches; looked up before the event takes the request out."""
        if not isinstance(event, RequestEvent):
            return None
        request = self.state.workload.requests.get(event.request)
        return request.instance if request else None

    async def _react(self, dispatcher: Dispatcher, event: LogEvent, touched: InstanceId | None) -> None:
        if touched:
            await self._publish(dispatcher.grant_waiting(touched, self._clock.now()))
        elif isinstance(event, FleetEvent):
            await self._publish(dispatcher.relocate_pending(self._clock.now()))

    # Commands

    async def _on_route(self, command: AnyCommand, reply: Reply) -> None:
        dispatcher = self.dispatcher
        if dispatcher is None or not isinstance(command, RouteRequest):
            return  # not leading: the ingress asks again
        started = self._clock.wall()
        self._waiters[command.request] = Waiter(command.attempt, reply, started)
        events = dispatcher.route(command, self._clock.now())
        telemetry.DECISION_SECONDS.observe(self._clock.wall() - started)
        await self._publish(events)
        if not events:
            await self._send(self._answer_again(command))

    def _answer_again(self, command: RouteRequest) -> list[Answer]:
        """A repeated command: what was answered before is answered again; what still waits, waits on."""
        request = self.state.workload.requests.get(command.request)
        if request is None:
            end = self.state.workload.end_of(command.request)
            detail = f"the request has ended already ({end})"
            return self._rejected(command.request, "already_ended", detail, 0.0)
        if request.stage is Stage.PREFILL and request.attempt == command.attempt:
            return self._granted(request)
        return []

    async def _on_cancel(self, command: AnyCommand, reply: Reply) -> None:
        if self.dispatcher is None or not isinstance(command, CancelRequest):
            return
        self._waiters.pop(command.request, None)
        await self._publish(self.dispatcher.cancel(command.request, command.reason, self._clock.now()))
        end = self.state.workload.end_of(command.request)
        ended = end in (RequestCancelled.__name__, RequestRejected.__name__)
        await reply(CancelAnswered(request=command.request, ended=ended))

    async def _on_describe(self, command: AnyCommand, reply: Reply) -> None:
        if isinstance(command, DescribeFleet):
            await reply(describe_fleet(self.state, self._policies, pool=self._pool, scheduler=self._name))

    # Publishing and answering

    async def _publish(self, events: list[LogEvent]) -> None:
        """Write decisions down, then answer who waits for them. The state is not touched."""
        answers = []
        for event in events:
            self._log.append_soon(event)
            answers += self._answers_to(event)
        await self._send(answers)

    async def _send(self, answers: list[Answer]) -> None:
        for reply, answer in answers:
            await reply(answer)

    def _answers_to(self, event: LogEvent) -> list[Answer]:
        match event:
            case RequestPlaced():
                telemetry.DECISIONS.labels(event.policy, "placed").inc()
            case RequestGranted():
                request = self.state.workload.requests.get(event.request)
                return self._granted(request) if request else []
            case RequestRejected():
                telemetry.DECISIONS.labels(event.policy, event.reason).inc()
                return self._rejected(event.request, event.reason, event.detail, event.retry_after)
            case RequestCancelled():
                self._waiters.pop(event.request, None)
            case _:
                pass
        return []

    def _granted(self, request: Request) -> list[Answer]:
        instance = self.state.fleet.get(request.instance)
        waiter = self._waiters.pop(request.id, None)
        if waiter is None or instance is None:
            return []
        answer = RouteGranted(
            request=request.id,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=request.prompt_tokens - request.uncached_tokens,
            predicted_ttft=request.placed_at - request.arrived_at + request.predicted_ttft,
            knowledge=_knowledge_for(request, instance),
        )
        return [(waiter.reply, answer)]

    def _rejected(self, request: RequestId, reason: str, detail: str, retry_after: Seconds) -> list[Answer]:
        waiter = self._waiters.pop(request, None)
        if waiter is None:
            return []
        answer = RouteRejected(
            request=request,
            attempt=waiter.attempt,
            status=503 if reason in UNAVAILABLE else 429,
            reason=reason,
            detail=detail,
            retry_after=retry_after,
        )
        return [(waiter.reply, answer)]

    # Looking after things

    async def _check_liveness(self, dispatcher: Dispatcher) -> None:
        settings, speed = self._settings, self._clock.speed
        now = self._clock.now()
        events = dispatcher.check_liveness(
            now,
            heard_since=self._listens_since,
            suspect_after=settings.suspect_seconds * speed,
            leave_after=settings.leave_seconds * speed,
        )
        for event in events:
            if isinstance(event, FleetEvent):
                log.warning("instance_silent", decision=type(event).__name__, instance=event.instance)
        for line in list(self.state.workload.lines):
            events += dispatcher.grant_waiting(line, now)
        await self._publish(events + dispatcher.relocate_pending(now))

    async def _check_waiters(self, dispatcher: Dispatcher) -> None:
        """Cancel what nobody waits for any more: an ingress repeats its command, or it has died."""
        settings, now, wall = self._settings, self._clock.now(), self._clock.wall()
        events: list[LogEvent] = []
        for request in list(self.state.workload.requests.values()):
            if request.stage in (Stage.ARRIVED, Stage.PENDING):
                waiter = self._waiters.get(request.id)
                heard = max(waiter.heard if waiter else 0.0, self._listens_since_wall)
                if wall - heard > settings.waiter_seconds:
                    events += dispatcher.cancel(request.id, "its ingress no longer asks for it", now)
            elif now - request.granted_at > settings.request_seconds_max * self._clock.speed:
                events += dispatcher.abandon(request.id, "granted long ago and never ended", now)
        await self._publish(events)

    async def _resync(self, instance: InstanceId, doubt: str, *, rejoin: bool = False) -> None:
        telemetry.CACHE_RESYNCS.labels(instance).inc()
        log.info("resync", instance=instance, doubt=doubt, rejoin=rejoin)
        command = ResyncCache(instance=instance, reason=doubt, rejoin=rejoin)
        subject = resync_subject(self._pool, instance)
        try:
            await self._commands.request(subject, command, timeout=RESYNC_TIMEOUT_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError) as error:
            log.warning("resync_unanswered", instance=instance, problem=str(error))


def _knowledge_for(request: Request, instance: Instance) -> str:
    """How well the choice was founded: what is known of the instance, and of the request's own keys."""
    if instance.knowledge is Knowledge.EXACT and not request.exact:
        return Knowledge.DEGRADED
    return instance.knowledge
