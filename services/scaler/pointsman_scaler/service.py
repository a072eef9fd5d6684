"""The scaler. In: the pool's log, the provider's instances. Out: decisions about the pool's size, and the steps towards
it. Steps follow from the log (`reconciler`). The lease holder acts; two at once do no harm, since decisions are
numbered and steps idempotent. Decisions go on while a provider hangs. Without a scaler the size stays."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import ScaleApplied
from pointsman.contracts.subjects import ANY_ACTOR, admin_subject
from pointsman.policies.scaling import ScalingPolicy
from pointsman.policies.scaling.decider import Decider
from pointsman.ports import Clock, InstanceProvider, Link, ProviderError
from pointsman.primitives import PoolName, Term, WallSeconds
from pointsman.runtime.containment import contained
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.leader_clock import LeaderClock
from pointsman.runtime.leadership import Leadership
from pointsman.runtime.log_follower import LogFollower
from pointsman.state.state import PoolSettings, State
from pointsman_scaler.decision_log import DecisionLog
from pointsman_scaler.desired_page import DesiredPage
from pointsman_scaler.reconciler import Grow, PoolStatus, Step
from pointsman_scaler.scale_commands import ScaleCommands
from pointsman_scaler.settings import ScalerSettings
from pointsman_scaler.size_report import SIZE, report_size
from pointsman_scaler.step_runner import StepRunner
from pointsman_scaler.trouble import Trouble
from pointsman_scaler.wanted_size import WantedSize

log = structlog.get_logger()

TICK_WALL_SECONDS: WallSeconds = WallSeconds(0.5)


class LeaseLostError(Exception):
    pass


class ScalerService:
    def __init__(
        self,
        *,
        link: Link,
        provider: InstanceProvider,
        policy: ScalingPolicy,
        clock: Clock,
        board: HealthBoard,
        settings: ScalerSettings,
        name: str,
    ) -> None:
        self._commands = link.commands
        self._clock = clock
        self._board = board
        self._pool = PoolName(settings.pool)
        self._runner = StepRunner(provider, link.commands, clock, settings)
        self._leadership = Leadership(link.scaler_lease, clock, name=name, lease_seconds=settings.scaler_lease_seconds)
        self._follower = LogFollower(
            link.log,
            link.checkpoints,
            clock=clock,
            board=board,
            settings=PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed),
            trackers=policy.trackers,
            on_event=self._on_event,
        )
        self._leader_clock = LeaderClock(clock, lambda: self._follower.state)
        self._now = clock.now if policy.by_date else self._leader_clock.now
        self._deciding = Trouble(settings.pool)
        self._decisions = DecisionLog(link.log, self._follower, self._leadership, clock, self._deciding)
        self._decider = Decider(
            policy=policy,
            limits=settings.limits,
            scaler=name,
            dropped=lambda: self._follower.first_sequence - 1,
            first_roles=settings.roles,
        )
        self._page = DesiredPage(self._follower, self._leadership, link.commands, clock, self._pool)
        self._size = WantedSize(self._follower, self._decider, self._runner, self._page, self._deciding)
        self._advice = ""
        if provider.manages:
            board.missing(SIZE, "the first instances are on their way")

    @property
    def state(self) -> State:
        return self._follower.state

    @property
    def acts(self) -> bool:
        return self._leadership.holds

    async def run(self) -> None:
        await self._follower.run()

    async def act(self) -> None:
        """Decide and act whenever it holds the lease. Never returns."""
        subject = admin_subject(self._pool, "scale", ANY_ACTOR)
        operators = ScaleCommands(self._size, self._decisions, self._leadership, self._now)
        while True:
            await self._leadership.obtain(term_of_log=self._term_of_log)
            log.info("scaler_active", policy=self._decider.policy.name, provider=self._runner.provider.name)
            try:
                async with self._commands.serve(subject, operators.on_scale), asyncio.TaskGroup() as tenure:
                    tenure.create_task(self._keep_lease(), name="keep-lease")
                    tenure.create_task(self._repeatedly(self._decide), name="decide")
                    tenure.create_task(self._repeatedly(self._reconcile), name="reconcile")
            except* LeaseLostError as lost:
                log.warning("scaler_standby", reason=str(lost.exceptions[0]))
                self._runner.forget_failures()
                self._deciding.forget()

    async def resign(self) -> None:
        """Release the lease; the next holder continues unfinished steps."""
        await self._leadership.resign()

    def desired(self) -> bytes | None:
        return self._page.read()

    async def pass_on_reads(self) -> None:
        await self._page.pass_on_reads()

    async def report(self) -> None:
        await report_size(self._size, self._board, self._clock, self._pool)

    def _on_event(self, event: LogEvent) -> None:
        self._leader_clock.note(event)
        self._decisions.note(event)

    def _term_of_log(self) -> Term | None:
        if not self._follower.caught_up:
            return None
        return Term(0 if self.state.scaling.decided is None else 1)

    async def _keep_lease(self) -> None:
        raise LeaseLostError(await self._leadership.keep(deposed=lambda: ""))

    async def _repeatedly(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contained("scaling"):
                if self.acts and self._follower.caught_up and self._commands.connected:
                    await act()
            await self._clock.sleep_wall(TICK_WALL_SECONDS)

    async def _decide(self) -> None:
        """Asks the provider for the first decision only."""
        try:
            absent = await self._runner.absent(self.state) if self.state.scaling.wanted is None else 0
        except ProviderError as error:
            self._deciding.note(str(error))
        else:
            unreplaced = self._runner.unreplaced(self.state)
            decision = self._decider.decide(self.state, self._now(), absent=absent, unreplaced=unreplaced)
            if decision is None and await self._decisions.may_drop_newest():
                decision = self._decider.repeated(self.state, self._now())
            if decision is not None:
                await self._decisions.write(decision)
        self._deciding.end_pass()

    async def _reconcile(self) -> None:
        wanted = self.state.scaling.wanted
        try:
            if wanted is not None:
                await self._take_steps(wanted)
        except ProviderError as error:
            self._runner.trouble.note(str(error))
        self._runner.end_pass()

    async def _take_steps(self, wanted: int) -> None:
        """Raises ProviderError."""
        steps = await self._runner.steps(self.state, wanted, self._size.roles)
        await self._take(steps)
        status = self._runner.status
        self._advise(self._size.by_hand(self._size.total or 0))
        if not steps and status is not None and status.settled(wanted):
            self._runner.forget_growth()
            if not self.state.scaling.is_applied:
                await self._decisions.append(self._applied(status, wanted))

    async def _take(self, steps: list[Step]) -> None:
        """One that fails does not hold up the others, but a Grow counts on the stops before it: it comes in the next pass."""
        failed: list[str] = []
        for step in steps:
            if self.acts and not (failed and isinstance(step, Grow)):
                try:
                    await self._runner.take(step)
                except ProviderError as error:
                    failed.append(str(error))
        if failed:
            self._runner.trouble.note("; ".join(failed))

    def _advise(self, advice: str) -> None:
        """Logs a change only, since it is called at every tick."""
        if advice and advice != self._advice:
            log.warning("manual_scaling_required", please=advice)
        self._advice = advice

    def _applied(self, status: PoolStatus, wanted: int) -> ScaleApplied:
        names = ", ".join(sorted(instance.id for instance in status.staying))
        return ScaleApplied(
            at=self._now(),
            current=status.in_service,
            wanted=wanted,
            detail=f"in service: {names}"[:1000],
            number=self.state.scaling.number,
            scaler=self._decider.scaler,
        )
