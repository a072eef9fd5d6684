"""The scheduler: folds the log, answers `cmd.route`, grants, and writes every decision down.

Four things run side by side on one event loop, and none of them waits while it changes the state: the *reader* folds
the log; the *candidate* waits for the lease, is elected and keeps it; the *command handlers* let the dispatcher decide;
the *housekeeper* looks after silence. A decision is applied at once, published off the path, and only then answered.
The leader passes over its own decisions when they come back through the log.

A term begins for everyone at its LeaderElected: the one who leads has then folded the log in order up to that entry, as
every follower has. A leader that is deposed throws its State away, since it holds decisions that the log may not have,
and begins a new *life* as a follower. So does one that reads in the log that writes of its own were lost.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import structlog

from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    DrainInstance,
    FollowAnswered,
    FollowRequests,
    HandOverRequest,
    MigrateRequests,
    ResyncCache,
    RouteGranted,
    RouteRejected,
    RouteRequest,
    SentRequest,
    UndrainInstance,
)
from pointsman.contracts.decisions import (
    HandOverRefused,
    LeaderElected,
    RequestGranted,
    RequestPlaced,
    RequestRejected,
    WritesLost,
)
from pointsman.contracts.fleet import (
    FleetEvent,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceUnejected,
    LivenessTimeouts,
)
from pointsman.contracts.reasons import CancelCause, RejectReason, grant_unheard, reject_answer
from pointsman.contracts.requests import RequestCancelled, RequestEvent
from pointsman.contracts.subjects import (
    cancel_subject,
    drain_subject,
    fleet_view_subject,
    follow_subject,
    handover_subject,
    migrate_subject,
    resync_subject,
    route_subject,
)
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.stranded import stranded
from pointsman.ports import (
    Checkpoints,
    Clock,
    CommandHandler,
    Commands,
    CommandTimeoutError,
    ElectionLostError,
    EventLog,
    Fence,
    Lease,
    LogEntry,
    LogMissingError,
    LogUnavailableError,
    NoResponderError,
    Reply,
)
from pointsman.primitives import Epoch, InstanceId, PoolName, RequestId, Seconds, Sequence, Term
from pointsman.runtime import telemetry
from pointsman.runtime.containment import DeadLetterWatch, contained
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.leadership import Leadership
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.workload import Request, Stage
from pointsman_scheduler.draining import take_drain
from pointsman_scheduler.fleet_status import FleetGauges, describe_fleet, foreign_keys
from pointsman_scheduler.heartbeats import Heartbeats
from pointsman_scheduler.migrating import MigrationHandler
from pointsman_scheduler.ownership import Ownership
from pointsman_scheduler.policy_config import empty_state
from pointsman_scheduler.recovery import LogBrokenError, Recovery, StartPoint
from pointsman_scheduler.settings import SchedulerSettings

log = structlog.get_logger()

LEADERSHIP = "leadership"
HOUSEKEEPING_WALL_SECONDS = 0.25
STALL_WALL_SECONDS = 1.0
"""A sleep so long means that this process stood still: what others said meanwhile is not read yet."""
LISTENED_WALL_SECONDS = 1.0
"""How long this leader must have heard others without a break before it judges how instances serve."""
HEALING_WALL_SECONDS = 0.5
RESYNC_TIMEOUT_WALL_SECONDS = 1.0
ELECTION_RETRY_WALL_SECONDS = 0.1
IDLE_WALL_SECONDS = 3.0
"""How long an engine must say that nothing runs there before it is believed over the books."""
RESIGN_FLUSH_WALL_SECONDS = 0.3
"""How long the last decisions may take to reach the log before a term is ended, or the lease given back."""

WAITING = (Stage.ARRIVED, Stage.PENDING)
"""Stages of requests that were not granted yet."""


Answer = tuple[Reply, RouteGranted | RouteRejected]


@dataclass(slots=True)
class Waiter:
    """An ingress that waits for an answer."""

    attempt: int
    reply: Reply


class DeposedError(Exception):
    """This scheduler leads no longer."""


class SchedulerService:
    """One scheduler of one pool. `run` folds the log for ever and leads whenever it holds the lease."""

    def __init__(
        self,
        *,
        event_log: EventLog,
        commands: Commands,
        lease: Lease,
        checkpoints: Checkpoints,
        clock: Clock,
        board: HealthBoard,
        settings: SchedulerSettings,
        policies: PolicySet,
        name: str,
    ) -> None:
        """`name`: of this process in the log and the lease; unlike that of any other, ever."""
        self._log = event_log
        self._commands = commands
        self._clock = clock
        self._board = board
        self._settings = settings
        self._policies = policies
        self._name = name
        self._pool = PoolName(settings.pool)
        self._leadership = Leadership(lease, clock, name=name, lease_seconds=settings.lease_seconds)
        self._following = Recovery(
            event_log=event_log,
            checkpoints=checkpoints,
            clock=clock,
            board=board,
            part=LEADERSHIP,
            empty_state=lambda: empty_state(settings, policies),
        )
        self._serving = AsyncExitStack()
        self._fence: Fence | None = None
        self._folded = asyncio.Event()
        self._settled = asyncio.Event()
        """Not set while this scheduler is being elected: commands wait for the outcome."""
        self._settled.set()
        self._end: Sequence = 0
        self._unschedulable: dict[InstanceId, str] = {}
        """Why each instance does not fit the pool, as was last said; empty where it fits."""
        self._waiters: dict[RequestId, Waiter] = {}
        self._ownership = Ownership()
        self._rejoins_asked: dict[InstanceId, Seconds] = {}
        """Who was asked to join again, and after which report."""
        self._hearing = Heartbeats(clock, suspect_seconds=settings.suspect_seconds)
        self._gauges = FleetGauges()
        self._dead_letters = DeadLetterWatch()
        self._unwritten: list[LogEvent] = []
        """Decisions that are in the state and not yet given to the log."""
        self._listens_since: Seconds = 0.0
        self._listens_since_wall: Seconds = 0.0
        self.state = empty_state(settings, policies)
        self._migrations: MigrationHandler | None = None
        self.dispatcher: Dispatcher | None = None
        """Present for the term of this scheduler. Whether it may decide at this moment `leading` tells."""
        board.missing(LEADERSHIP, "folding the log")

    @property
    def leading(self) -> Dispatcher | None:
        """The dispatcher, while this scheduler may decide: not once it has read of a later term, whatever its clock says of
        the lease. A machine that was suspended does not know for how long."""
        dispatcher = self.dispatcher
        may = dispatcher is not None and self.state.term <= dispatcher.term and self._leadership.holds
        return dispatcher if may else None

    async def run(self) -> None:
        """Follow, lead, follow again; ends only by cancellation or failure."""
        while True:
            beginning = await self._following.begin()
            try:
                async with asyncio.TaskGroup() as life:
                    self._begin_life(beginning)
                    life.create_task(self._fold(beginning), name="fold")
                    life.create_task(self._stand(life), name="stand")
            except* (LogBrokenError, DeposedError) as ends:
                self._end_life(str(ends.exceptions[0]))
            finally:
                await self._stop_serving()

    async def resign(self) -> None:
        """Stop to decide, and give the lease back once what was decided is in the log. For a shutdown in order."""
        await self._stop_serving()
        if not await self._log.flush(RESIGN_FLUSH_WALL_SECONDS):
            log.warning("decisions_unconfirmed", seconds=RESIGN_FLUSH_WALL_SECONDS)
        await self._leadership.resign()

    async def keep_house(self) -> None:
        """Look after silent workers, forgotten requests and the gauges, for ever."""
        while True:
            began = self._clock.wall()
            await self._clock.sleep_wall(HOUSEKEEPING_WALL_SECONDS)
            stood_still = self._clock.wall() - began > STALL_WALL_SECONDS
            if (
                stood_still
                or not self._commands.connected
                or self._hearing.log_is_silent(len(self.state.fleet.instances))
            ):
                self._listen_from_now()
            with contained("liveness"):
                if self.leading is not None:
                    await self._check_liveness(self.leading)
            with contained("outliers"):
                if self.leading is not None:
                    await self._eject_outliers(self.leading)
            with contained("lost requests"):
                if self.leading is not None:
                    await self._give_up_lost(self.leading)
            self._say_whether_ready()
            telemetry.LEADER.set(self.leading is not None)
            telemetry.LEADER_TERM.set(self.state.term)
            with contained("gauges"):
                self._gauges.show(self.state)

    async def heal(self) -> None:
        """Ask for a snapshot wherever the index is in doubt, for ever."""
        while True:
            await self._clock.sleep_wall(HEALING_WALL_SECONDS)
            with contained("healing"):
                if self.leading is not None:
                    await self._heal_doubts()

    async def _heal_doubts(self) -> None:
        for instance in self.state.fleet.instances:
            if instance.forged:
                await self._resync(instance.id, instance.doubt, rejoin=True)
            elif instance.contradicted:
                await self._resync(instance.id, instance.contradicted, distrust=instance.epoch)
            elif instance.doubt:
                await self._resync(instance.id, instance.doubt)
        for stranger, heard_at in list(self.state.unregistered.items()):
            if self._rejoins_asked.get(stranger) != heard_at:  # told by the stranger's clock, which may be wrong
                self._rejoins_asked[stranger] = heard_at
                await self._resync(stranger, "it reports, but the log does not say that it joined", rejoin=True)

    # Folding

    def _begin_life(self, beginning: StartPoint) -> None:
        self.state = beginning.state
        self._end = beginning.end
        self._fence = None
        self._waiters.clear()
        self._ownership.clear()

    def _end_life(self, reason: str) -> None:
        """What is decided and not yet written is void: the next leader has not seen it."""
        log.warning("term_ended", reason=reason, led=self.dispatcher is not None)
        self._board.missing(LEADERSHIP, reason)
        if self._fence is not None:
            self._fence.broken = self._fence.broken or reason

    async def _fold(self, beginning: StartPoint) -> None:
        """Raises LogBrokenError."""
        async for entry in self._following.entries(beginning):
            await self._take_in(entry)
            self._folded.set()

    async def _folded_to(self, sequence: Sequence) -> None:
        while self.state.sequence < sequence:
            self._folded.clear()
            await self._folded.wait()

    @property
    def _caught_up(self) -> bool:
        return self.state.sequence >= self._end

    # Leading

    async def _stand(self, life: asyncio.TaskGroup) -> None:
        """Wait for the lease, be elected, and lead while the lease is ours.

        Commands are taken in before the election is heard of: who asks the new leader at once must not ask in vain.
        """
        await self._leadership.obtain(term_of_log=lambda: self.state.term if self._caught_up else None)
        life.create_task(self._keep_lease(), name="keep-lease")
        self._settled.clear()
        await self._serve(route_subject(self._pool), self._on_route)
        await self._serve(handover_subject(self._pool), self._on_hand_over)
        await self._serve(follow_subject(self._pool), self._on_follow)
        await self._serve(cancel_subject(self._pool), self._on_cancel)
        await self._serve(migrate_subject(self._pool), self._on_migrate)
        await self._serve(drain_subject(self._pool), self._on_drain)
        await self._serve(fleet_view_subject(self._pool), self._on_describe)
        elected, fence = await self._be_elected()
        await self._folded_to(fence.elected)
        self._lead(elected.term, fence)
        with contained("relocation"):
            if self.leading is not None:
                await self._publish(self.leading.relocate_pending(self._clock.now()))  # who drained while nobody led

    async def _keep_lease(self) -> None:
        """Raises DeposedError."""
        reason = await self._leadership.keep(deposed=lambda: self._fence.broken if self._fence else "")
        raise DeposedError(reason)

    async def _be_elected(self) -> tuple[LeaderElected, Fence]:
        """Put our LeaderElected behind the last one, which must be folded before."""
        while True:
            try:
                extent = await self._log.extent()
                await self._folded_to(extent.last)
                elected, last = self._election(), self.state.elected
                return elected, await self._log.elect(elected, after=last if last >= extent.first else 0)
            except ElectionLostError as error:
                log.info("election_lost", reason=str(error))
            except (LogUnavailableError, LogMissingError) as error:
                self._board.missing(LEADERSHIP, f"the log does not answer: {error}")
            await self._clock.sleep_wall(ELECTION_RETRY_WALL_SECONDS)

    def _election(self) -> LeaderElected:
        state = self.state
        return LeaderElected(
            at=self._clock.now(),
            term=self._leadership.term_above(state.term),
            scheduler=self._name,
            as_of=state.sequence,
            pool=asdict(state.settings),
            policy=self._policies.routing.name,
            settings=self._policies.settings,
        )

    def _lead(self, term: Term, fence: Fence) -> None:
        state = self.state
        self._listen_from_now()
        self._hearing.begin()
        self._fence = fence
        self._unwritten = []
        self.dispatcher = Dispatcher(state, self._policies, term=term, on_decision=self._note_decision)
        self._migrations = MigrationHandler(self.dispatcher)
        self._settled.set()
        self._say_whether_ready()
        log.info("leading", term=term, as_of=state.sequence, instances=len(state.fleet.instances))

    def _note_decision(self, decision: LogEvent) -> LogEvent:
        self._unwritten.append(decision)
        return decision

    async def _stop_serving(self) -> None:
        self.dispatcher = None
        self._settled.set()
        await self._serving.aclose()

    def _say_whether_ready(self) -> None:
        """A follower that has caught up is ready: to lead."""
        leader = self._leadership.leader
        if self.dispatcher is not None and self.leading is None:
            self._board.missing(LEADERSHIP, "the lease could not be renewed in time")
        elif self.dispatcher is None and not self._caught_up:
            self._board.missing(LEADERSHIP, "folding the log")
        elif self.dispatcher is None and leader in ("", self._name):
            self._board.missing(LEADERSHIP, "taking over")
        else:
            self._board.restored(LEADERSHIP)

    def _listen_from_now(self) -> None:
        """Silence before this moment says nothing about others: nobody here could hear them."""
        self._listens_since, self._listens_since_wall = self._clock.now(), self._clock.wall()

    async def _serve(self, subject: str, handler: CommandHandler) -> None:
        """Answer a command for as long as the lease is ours; before that nobody does, and the asker knows it."""
        await self._serving.enter_async_context(self._commands.serve(subject, handler))

    async def _take_in(self, entry: LogEntry) -> None:
        event = entry.event
        if event is None or self._is_own(event):
            self._hearing.heard(event.stamp.number if event is not None and event.stamp is not None else 0)
            self.state.skip(entry.sequence, subject=entry.subject, problem=entry.problem)
        else:
            self._hearing.heard()
            touched = self._instance_of(event)
            self.state.apply(event, entry.sequence)
            if isinstance(event, LeaderElected):
                self._hear_election(event)
            elif isinstance(event, InstanceJoined | InstanceLeft):
                with contained("key_check"):
                    self._check_keys(event.instance)
                    self._check_models()
            elif isinstance(event, WritesLost) and event.writer == self._name and self.dispatcher is not None:
                await self._end_term(f"the log misses {event.count} decisions of this leader: {event.reason}")
            with contained("reaction"):
                if self.leading is not None:
                    await self._react(self.leading, event, touched)
        self._dead_letters.look(self.state.dead_letters)

    def _hear_election(self, event: LeaderElected) -> None:
        """Another leads: what was decided here and is not written yet never will be, and this life ends at the next look
        at the lease."""
        if self._fence is not None and self.dispatcher is not None and event.term > self.dispatcher.term:
            self._fence.broken = self._fence.broken or f"{event.scheduler} was elected for term {event.term}"

    async def _end_term(self, reason: str) -> None:
        """What was decided and is not in the log nobody else knows, and no replay can tell what followed from it. The term
        ends; who leads in the next, perhaps this scheduler, goes on from what the log says. Raises DeposedError."""
        await self._stop_serving()
        await self._log.flush(RESIGN_FLUSH_WALL_SECONDS)
        raise DeposedError(reason)

    def _check_keys(self, instance: InstanceId) -> None:
        """Say aloud that an instance joined which cannot be used as it is meant to be."""
        known = self.state.fleet.get(instance)
        problem = foreign_keys(known, self.state.settings.block_tokens) if known is not None else ""
        if problem:
            log.error("cache_keys_mismatch", instance=instance, problem=problem)

    def _check_models(self) -> None:
        """Say aloud which instances do not fit the pool any more, and which fit again: one that joins or leaves may decide
        for the others what the pool serves."""
        fleet = self.state.fleet
        before, self._unschedulable = self._unschedulable, {i.id: i.unschedulable for i in fleet.instances}
        for instance, problem in self._unschedulable.items():
            if problem and problem != before.get(instance, ""):
                log.error("instance_unschedulable", instance=instance, problem=problem)
            elif before.get(instance) and not problem:
                log.info("instance_schedulable", instance=instance, model=fleet.model)

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
            now = self._clock.now()
            await self._publish(dispatcher.relocate_pending(now) + dispatcher.place_held(now))

    # Commands

    async def _on_route(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        dispatcher = self.leading
        if dispatcher is None or not isinstance(command, RouteRequest):
            return  # not leading: the ingress asks again
        started = self._clock.wall()
        self._ownership.named(command.request, started)
        self._waiters[command.request] = Waiter(command.attempt, reply)
        events = dispatcher.route(command, self._clock.now())
        telemetry.DECISION_SECONDS.observe(self._clock.wall() - started)
        await self._publish(events or self._give_up_forsaken(command, dispatcher))
        if not events:
            self._waiters[command.request] = Waiter(command.attempt, reply)
            await self._send(self._answer_again(command))

    def _give_up_forsaken(self, command: RouteRequest, dispatcher: Dispatcher) -> list[LogEvent]:
        """End a request that was granted to an instance that is gone, though its ingress never heard so and still asks:
        told that it has ended, the ingress asks under another id."""
        known = self.state.workload.requests.get(command.request)
        if known is None or known.stage in WAITING or known.instance in self.state.fleet:
            return []
        return dispatcher.abandon(
            known.id, CancelCause.GRANT_UNHEARD, self._clock.now(), reason=grant_unheard(known.instance)
        )

    def _answer_again(self, command: RouteRequest) -> list[Answer]:
        """A repeated command: what was answered before is answered again; what still waits, waits on."""
        workload = self.state.workload
        request = workload.requests.get(command.request)
        if request is None:
            told = workload.rejection_of(command.request, arrived_at=command.arrived_at, attempt=command.attempt)
            if told is not None:
                return self._rejected(command.request, told.reason, told.detail, told.retry_after)
            detail = f"the request has ended already ({workload.end_of(command.request)})"
            return self._rejected(command.request, RejectReason.ALREADY_ENDED.value, detail, 0.0)
        if request.stage not in WAITING and request.attempt == command.attempt:
            return self._granted(request)
        return []

    async def _on_hand_over(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        dispatcher = self.leading
        if dispatcher is None or not isinstance(command, HandOverRequest):
            return
        events = dispatcher.hand_over(command, self._clock.now())
        await self._publish(events)
        request = self.state.workload.requests.get(command.request)
        answer: RouteGranted | RouteRejected | None = None
        if request is None or request.attempt != command.attempt or not request.prefilled_by:
            answer = self._not_handed_over(command)
        elif request.awaits_decoder:
            answer = next((self._refused_late(event) for event in events if isinstance(event, HandOverRefused)), None)
        else:
            answer = self._grant_of(request)
        if answer is not None:  # else its instance is gone already: going there, its ingress will see
            await reply(answer)

    def _not_handed_over(self, command: HandOverRequest) -> RouteRejected:
        """Why the request goes nowhere. Of a prefill that we do not know, its ingress knows more than we."""
        end = self.state.workload.end_of(command.request)
        reason, detail = RejectReason.UNKNOWN_REQUEST, f"nothing is known of a prefill at {command.instance}"
        if end is not None:
            reason, detail = RejectReason.ALREADY_ENDED, f"the request has ended already ({end})"
        return RouteRejected(
            request=command.request,
            attempt=command.attempt,
            status=reject_answer(reason).status,
            reason=reason.value,
            detail=detail,
            retry_after=0.0,
            term=self._term,
        )

    def _refused_late(self, event: HandOverRefused) -> RouteRejected:
        telemetry.DECISIONS.labels(self._policies.routing.name, event.reason).inc()
        return RouteRejected(
            request=event.request,
            attempt=event.attempt,
            status=reject_answer(event.reason).status,
            reason=event.reason,
            detail=event.detail,
            retry_after=event.retry_after,
            term=self._term,
        )

    async def _on_follow(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        if self.leading is None or not isinstance(command, FollowRequests):
            return
        self._ownership.followed(command, self._clock.wall())
        grants = (self._rebound_to(sent) for sent in command.requests)
        rebound = [grant for grant in grants if grant is not None]
        outliers = self.state.outliers
        given_up = [sent.request for sent in command.requests if outliers.is_idle_at(sent.request, sent.instance)]
        await reply(FollowAnswered(rebound=rebound, given_up=given_up, term=self._term))

    def _rebound_to(self, sent: SentRequest) -> RouteGranted | None:
        """Where a request is to go that its ingress still has at `sent.instance`; None where it stays there."""
        request = self.state.workload.requests.get(sent.request)
        if request is None or request.attempt != sent.attempt or request.rebound_from != sent.instance:
            return None
        return self._grant_of(request) if request.stage not in WAITING else None

    async def _on_cancel(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        dispatcher = self.leading
        if dispatcher is None or not isinstance(command, CancelRequest):
            return
        self._waiters.pop(command.request, None)
        cause = CancelCause(command.reason)
        await self._publish(dispatcher.cancel(command.request, cause, self._clock.now(), reason=command.reason))
        end = self.state.workload.end_of(command.request)
        ended = end in (RequestCancelled.__name__, RequestRejected.__name__)
        await reply(CancelAnswered(request=command.request, ended=ended))

    async def _on_drain(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        dispatcher = self.leading
        if dispatcher is None or not isinstance(command, DrainInstance | UndrainInstance):
            return
        now = self._clock.now()
        events, answer = take_drain(dispatcher, command, now)
        await self._publish(events + dispatcher.place_held(now))
        await reply(answer)

    async def _on_migrate(self, command: AnyCommand, reply: Reply) -> None:
        await self._settled.wait()
        if self.leading is None or self._migrations is None or not isinstance(command, MigrateRequests):
            return  # not leading: whoever planned plans again
        events, answer = self._migrations.take(command, self._clock.now())
        await self._publish(events)
        await reply(answer)

    async def _on_describe(self, command: AnyCommand, reply: Reply) -> None:
        if isinstance(command, DescribeFleet):
            await reply(describe_fleet(self.state, self._policies, pool=self._pool, scheduler=self._name))

    # Publishing and answering

    async def _publish(self, events: list[LogEvent]) -> None:
        """Write decisions down, then answer who waits for them. The state is not touched.

        With `events` go those of a step before that failed after it had decided them: they are in the state.
        """
        decided, self._unwritten = self._unwritten or events, []
        answers = []
        for event in decided:
            self._log.append_soon(event, self._fence)
            if event.stamp is not None:
                self._hearing.wrote(event.stamp.number)
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
        waiter = self._waiters.pop(request.id, None)
        answer = self._grant_of(request)
        if waiter is None or answer is None:
            return []
        return [(waiter.reply, answer)]

    def _grant_of(self, request: Request) -> RouteGranted | None:
        """Where the request is to go now; None where that instance is gone."""
        instance = self.state.fleet.get(request.instance)
        if instance is None:
            return None
        decoder = self.state.fleet.get(request.decode)
        return RouteGranted(
            request=request.id,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=request.prompt_tokens - request.uncached_tokens,
            predicted_ttft=request.placed_at - request.arrived_at + request.predicted_ttft,
            knowledge=_knowledge_for(request, instance),
            term=self._term,
            decode=request.decode,
            decode_url=decoder.url if decoder else "",
            prefilled_by=request.prefilled_by,
            dp_rank=instance.dp_rank,
            rebind=request.rebind,
            expected_seconds=self.state.latency.expected_seconds(
                instance.id, request.engine_seconds, request.engine_tokens
            ),
        )

    def _rejected(self, request: RequestId, reason: str, detail: str, retry_after: Seconds) -> list[Answer]:
        waiter = self._waiters.pop(request, None)
        if waiter is None:
            return []
        answer = RouteRejected(
            request=request,
            attempt=waiter.attempt,
            status=reject_answer(reason).status,
            reason=reason,
            detail=detail,
            retry_after=retry_after,
            term=self._term,
        )
        return [(waiter.reply, answer)]

    @property
    def _term(self) -> Term:
        return self.dispatcher.term if self.dispatcher is not None else Term(0)

    # Looking after things

    async def _check_liveness(self, dispatcher: Dispatcher) -> None:
        settings, speed = self._settings, self._clock.speed
        now = self._clock.now()
        timeouts = LivenessTimeouts(
            heard_since=self._listens_since,
            suspect_after=settings.suspect_seconds * speed,
            leave_after=settings.leave_seconds * speed,
        )
        events = dispatcher.check_liveness(timeouts, now)
        for event in events:
            if isinstance(event, FleetEvent):
                log.warning("instance_silent", decision=type(event).__name__, instance=event.instance)
        events += dispatcher.relocate_pending(now)  # first: what can leave a draining instance is not granted there
        for line in list(self.state.workload.queues):
            events += dispatcher.grant_waiting(line, now)
        await self._publish(events + dispatcher.place_held(now))

    async def _eject_outliers(self, dispatcher: Dispatcher) -> None:
        now = self._clock.now()
        if now - self._listens_since < LISTENED_WALL_SECONDS * self._clock.speed:
            return
        events = dispatcher.eject_outliers(now)
        for event in events:
            if isinstance(event, InstanceEjected):
                telemetry.INSTANCE_EJECTIONS.labels(event.instance, event.cause).inc()
                log.warning("instance_ejected", instance=event.instance, cause=event.cause, detail=event.detail)
            elif isinstance(event, InstanceUnejected):
                log.info("instance_unejected", instance=event.instance, half_open=event.half_open)
        await self._publish(events)

    async def _give_up_lost(self, dispatcher: Dispatcher) -> None:
        """End what nobody else would: requests whose ingress is gone, that no engine has, or that never ended."""
        now, speed = self._clock.now(), self._clock.speed
        events: list[LogEvent] = []
        for request in self._orphans():
            give_up = dispatcher.cancel if request.stage in WAITING else dispatcher.abandon
            events += give_up(request.id, CancelCause.INGRESS_SILENT, now)
        for request in list(stranded(self.state, now, idle_after=IDLE_WALL_SECONDS * speed)):
            events += dispatcher.abandon(request.id, CancelCause.ENGINE_IDLE, now)
        for request in list(self.state.workload.requests.values()):
            waits = request.stage in WAITING
            if not waits and now - request.granted_at > self._settings.request_seconds_max * speed:
                events += dispatcher.abandon(request.id, CancelCause.NEVER_ENDED, now)
        await self._publish(events)

    def _orphans(self) -> list[Request]:
        """Requests without an ingress. One of an older version names only what waits, and not what is re-bound."""
        requests = list(self.state.workload.requests.values())
        silent = self._ownership.orphans(
            requests, self._clock.wall(), since=self._listens_since_wall, silence_max=self._settings.waiter_seconds
        )
        return [r for r in silent if r.followed or (r.stage in WAITING and not r.rebound_from)]

    async def _resync(
        self, instance: InstanceId, doubt: str, *, rejoin: bool = False, distrust: Epoch | None = None
    ) -> None:
        """`distrust`: the epoch in which the engine has contradicted its own events."""
        telemetry.CACHE_RESYNCS.labels(instance).inc()
        log.info("resync", instance=instance, doubt=doubt, rejoin=rejoin, distrust=distrust)
        above = max(Epoch(0), self.state.newest_epoch(instance)) if rejoin else distrust or Epoch(0)
        command = ResyncCache(
            instance=instance, reason=doubt, rejoin=rejoin, above=above, distrust=distrust is not None
        )
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
