"""Leadership: obtain the lease, append LeaderElected behind the last one, read up to it, then decide. The term ends
(DeposedError) when the lease is lost, another leader is elected, the log misses decisions, or it cannot be read."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.wire import WIRE_VERSION
from pointsman.policies.clock_offsets import ClockOffsets
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import SETTINGS_EVERY, Recording
from pointsman.policies.heard_reports import HeardReports
from pointsman.policies.large_pool import prepare_columns
from pointsman.policies.lost_requests import LostRequests
from pointsman.ports import (
    CommandHandler,
    Commands,
    ElectionLostError,
    Fence,
    LogUnavailableError,
)
from pointsman.primitives import Term, WallSeconds
from pointsman.runtime.leadership import Leadership
from pointsman.state.key_table import COMPILED
from pointsman.state.state import State
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.decision_spans import DecisionSpans
from pointsman_scheduler.flush_pace import FlushPace
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.migrating import MigrationHandler
from pointsman_scheduler.ownership import Ownership
from pointsman_scheduler.read_progress import LOOK_WALL_SECONDS, ReadProgress
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.waiters import Answers, Waiters

log = structlog.get_logger()

LEADERSHIP = "leadership"
ELECTION_RETRY_WALL_SECONDS: WallSeconds = WallSeconds(0.1)
FLUSH_WALL_SECONDS: WallSeconds = WallSeconds(0.3)
"""Time for the last decisions to reach the log."""


class DeposedError(Exception):
    """This scheduler no longer leads."""


class ActiveTerm:
    """A term of this leader: its Dispatcher, and what it knows beside the log. `publish` after every use of the
    Dispatcher, without a wait between the two."""

    def __init__(
        self, state: State, context: SchedulerContext, log_liveness: LogLiveness, *, term: Term, fence: Fence
    ) -> None:
        recording = Recording(context.settings.rivals, settings_every=SETTINGS_EVERY)
        self.dispatcher = Dispatcher(state, context.policies, term=term, on_decision=self._collect, recording=recording)
        self.waiters = Waiters(self.dispatcher, context.pool)
        self.ownership = Ownership()
        self.heard = HeardReports()
        self.clock_offsets = ClockOffsets(state.settings.speed)
        self.lost = LostRequests()
        self.flush_pace = FlushPace(context.clock.wall())
        self.migrations = MigrationHandler(self.dispatcher, context.pool)
        self.spans = None if context.tracer is None else DecisionSpans(context.tracer)
        self._fence = fence
        self._log = context.link.log
        self._log_liveness = log_liveness
        self._unwritten: list[LogEvent] = []
        """Decisions since the last `publish`, in order."""

    @property
    def term(self) -> Term:
        return self.dispatcher.term

    async def publish(self) -> None:
        """Answers and writes all decisions since the last call, also those of a turn that failed after them. Answers
        first: ingresses wait for them, nobody for the log."""
        decided, self._unwritten = self._unwritten, []
        try:
            await send([answer for event in decided for answer in self.waiters.answers_to(event)])
        finally:
            for event in decided:
                self._write(event)

    def _write(self, event: LogEvent) -> None:
        on_stored = None if self.spans is None else self.spans.decided(event)
        self._log.append_soon(event, self._fence, on_stored)
        if event.stamp is not None:
            self._log_liveness.decision_written(event.stamp.number)

    def note(self, event: LogEvent) -> None:
        """Writes what is no decision."""
        self._log.append_soon(event, self._fence)

    def _collect(self, decision: LogEvent) -> LogEvent:
        self._unwritten.append(decision)
        return decision


async def send(answers: Answers) -> None:
    """Does not wait, as no reply does: decisions are written in their order."""
    for reply, answer in answers:
        await reply(answer)


@asynccontextmanager
async def _at_once(contexts: Sequence[AbstractAsyncContextManager[None]]) -> AsyncIterator[None]:
    """Enters and leaves all together: each waits for the server."""
    stacks = [AsyncExitStack() for _ in contexts]
    try:
        async with asyncio.TaskGroup() as entering:
            for stack, context in zip(stacks, contexts, strict=True):
                entering.create_task(stack.enter_async_context(context))
        yield
    finally:
        await asyncio.gather(*(stack.aclose() for stack in stacks))


class Candidacy:
    def __init__(self, context: SchedulerContext, replica: Replica, log_liveness: LogLiveness) -> None:
        clock, link, lease_seconds = context.clock, context.link, context.settings.lease_seconds
        self._context = context
        self._log = link.log
        self._clock = clock
        self._board = context.board
        self._leadership = Leadership(link.lease, clock, name=context.name, lease_seconds=lease_seconds)
        self._replica = replica
        self._log_liveness = log_liveness
        self._serving = AsyncExitStack()
        self._fence: Fence | None = None
        self._unreadable = ""
        """Why this process must not lead, though the log answers."""
        self._settled = asyncio.Event()
        """Cleared during an election."""
        self._settled.set()
        self.term: ActiveTerm | None = None

    @property
    def leading(self) -> ActiveTerm | None:
        """None after reading a later term, whatever the clock says: the machine may have been suspended."""
        term = self.term
        may = term is not None and self._replica.state.term <= term.term and self._leadership.holds
        return term if may else None

    async def settled(self) -> None:
        await self._settled.wait()

    def reset(self) -> None:
        self._fence = None
        self._unreadable = ""

    async def obtain_lease(self) -> None:
        replica = self._replica
        await self._leadership.obtain(term_of_log=lambda: replica.state.term if replica.caught_up else None)

    async def keep_lease(self) -> None:
        """Raises DeposedError. Who cannot read the log leaves the lease to others at once, and competes again once it has
        read what there is (`obtain_lease`)."""
        reason = await self._leadership.keep(deposed=self._unfitness)
        if self._unreadable:
            await self._close_and_flush()
            await self._leadership.release()
        raise DeposedError(reason)

    async def watch_reading(self) -> None:
        """Ends once the log answers and cannot be read."""
        progress = ReadProgress()
        while not self._unreadable:
            await self._clock.sleep_wall(LOOK_WALL_SECONDS)
            try:
                extent = await self._log.extent()
            except LogUnavailableError:
                progress.forget()
            else:
                self._unreadable = progress.look(self._replica.state.sequence, extent.end)

    async def open(self, commands: Commands, handlers: Iterable[tuple[str, CommandHandler]]) -> None:
        self._settled.clear()
        await self._serving.enter_async_context(_at_once([commands.serve(*each) for each in handlers]))

    async def take_office(self) -> None:
        """Raises DeposedError."""
        elected, fence = await self._elect()
        await self._replica.reached(fence.elected)
        state, self._fence = self._replica.state, fence
        if state.term != elected.term:
            raise DeposedError(f"another leader was elected for term {state.term} before term {elected.term} began")
        prepare_columns(state)
        self._log_liveness.begin()
        self.term = ActiveTerm(state, self._context, self._log_liveness, term=elected.term, fence=fence)
        self._settled.set()
        self.report_readiness()
        log.info(
            "leading",
            term=elected.term,
            as_of=state.sequence,
            instances=len(state.fleet.instances),
            key_table="compiled" if COMPILED else "python",
        )

    async def close(self) -> None:
        if self.term is not None and self.term.spans is not None:
            self.term.spans.close()
        self.term = None
        self._settled.set()
        await self._serving.aclose()

    async def resign(self) -> None:
        """Releases the lease after the last decisions are written."""
        await self._close_and_flush()
        await self._leadership.resign()

    async def end_term(self, reason: str) -> None:
        """End a term with lost decisions: no other process has them. Raises DeposedError."""
        await self._close_and_flush()
        raise DeposedError(reason)

    def void_unwritten(self, reason: str) -> None:
        if self._fence is not None:
            self._fence.broken = self._fence.broken or reason

    def note_election(self, event: LeaderElected) -> None:
        if self.term is not None and event.term > self.term.term:
            self.void_unwritten(f"{event.scheduler} was elected for term {event.term}")

    def is_own(self, event: LogEvent) -> bool:
        return self.term is not None and event.stamp is not None and event.stamp.term == self.term.term

    def report_readiness(self) -> None:
        trouble = self._leadership.trouble and f": the lease cannot be written: {self._leadership.trouble}"
        if self.term is not None and self.leading is None:
            self._board.missing(LEADERSHIP, f"the lease could not be renewed in time{trouble}")
        elif self.term is None and not self._replica.caught_up:
            self._board.missing(LEADERSHIP, "folding the log")
        elif self.term is None and self._leadership.leader in ("", self._context.name):
            self._board.missing(LEADERSHIP, f"taking over{trouble}")
        else:
            self._board.restored(LEADERSHIP)

    def _unfitness(self) -> str:
        return self._unreadable or (self._fence.broken if self._fence else "")

    async def _close_and_flush(self) -> None:
        await self.close()
        if not await self._log.flush(FLUSH_WALL_SECONDS):
            log.warning("decisions_unconfirmed", seconds=FLUSH_WALL_SECONDS)

    async def _elect(self) -> tuple[LeaderElected, Fence]:
        while True:
            try:
                extent = await self._log.extent()
                await self._replica.reached(extent.end)
                if self._leadership.holds:  # else `keep_lease` ends the term, unless the lease is renewed
                    self._clock.begin(self._replica.state.now)  # what ends by time goes on where the leader before was
                    elected, last = self._election(), self._replica.state.elected
                    return elected, await self._log.elect(elected, after=last if last >= extent.first else 0)
            except ElectionLostError as error:
                log.info("election_lost", reason=str(error))
            except LogUnavailableError as error:
                self._board.missing(LEADERSHIP, f"the log does not answer: {error}")
            await self._clock.sleep_wall(ELECTION_RETRY_WALL_SECONDS)

    def _election(self) -> LeaderElected:
        state, policies = self._replica.state, self._context.policies
        return LeaderElected(
            at=self._clock.now(),
            term=self._leadership.term_above(state.term),
            scheduler=self._context.name,
            as_of=state.sequence,
            pool=asdict(state.settings),
            policy=policies.routing.name,
            settings=policies.settings,
            wire=WIRE_VERSION,
        )
