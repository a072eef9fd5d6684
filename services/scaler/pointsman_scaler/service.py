"""The scaler. In: the pool's log, the provider's instances, `cmd.scale`. Out: ScaleDecided, ScaleApplied, provider
calls. Steps follow from the log (`reconciler`). The lease holder acts; two at once do no harm, since decisions are
numbered and steps idempotent. Without a scaler the size stays."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import asdict

import structlog

from pointsman.contracts.codec import AnyCommand, LogEvent, UnwritableError
from pointsman.contracts.commands import ScaleAnswered, ScalePool, refusal_of
from pointsman.contracts.decisions import ScaleApplied, ScaleDecided
from pointsman.contracts.subjects import ANY_ACTOR, SCALER_ACTOR, actor_of, admin_subject
from pointsman.policies.scaling import Limits, ScalingPolicy
from pointsman.policies.scaling.decider import Decider, in_service, wanted_roles
from pointsman.policies.scaling.manual import Manual
from pointsman.policies.scaling.roles import (
    NOT_SIZED,
    RoleSizes,
    drained_by_operators,
    fixed_sizes,
    role_switches,
    staying,
)
from pointsman.ports import (
    Checkpoints,
    Clock,
    Commands,
    CommandTimeoutError,
    EventLog,
    InstanceProvider,
    Lease,
    LogMissingError,
    LogUnavailableError,
    NoResponderError,
    ProviderError,
    Reply,
)
from pointsman.primitives import PoolName, Sequence, Term, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.admin_log import log_admin_action
from pointsman.runtime.containment import contained
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.leadership import Leadership
from pointsman.runtime.log_follower import LogFollower
from pointsman.runtime.log_metrics import measure_log
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State
from pointsman_scaler.reconciler import PoolStatus, Step
from pointsman_scaler.settings import ScalerSettings
from pointsman_scaler.step_runner import StepRunner

log = structlog.get_logger()

TICK_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
REPORT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
READ_BACK_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
LOG_CHECK_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
AUTOSCALER_WALL_SECONDS: WallSeconds = WallSeconds(300.0)
"""Between two reads of /desired. KEDA reads it every 15 to 30 s."""
SIZE = "size"


class LeaseLostError(Exception):
    pass


class ScalerService:
    def __init__(
        self,
        *,
        event_log: EventLog,
        checkpoints: Checkpoints,
        commands: Commands,
        lease: Lease,
        provider: InstanceProvider,
        policy: ScalingPolicy,
        clock: Clock,
        board: HealthBoard,
        settings: ScalerSettings,
        name: str,
    ) -> None:
        pool = PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed)
        self._log = event_log
        self._commands = commands
        self._runner = StepRunner(provider, commands, clock, settings)
        self._clock = clock
        self._name = name
        self._pool = PoolName(settings.pool)
        self._leadership = Leadership(lease, clock, name=name, lease_seconds=settings.scaler_lease_seconds)
        self._follower = LogFollower(
            event_log,
            checkpoints,
            clock=clock,
            board=board,
            settings=pool,
            trackers=policy.trackers,
            on_event=self._on_event,
        )
        self._decider = Decider(
            policy=policy,
            limits=Limits(
                lowest=settings.min_instances,
                highest=settings.max_instances,
                step_up=settings.step_up,
                step_down=settings.step_down,
                pause_up_s=settings.pause_up_seconds,
                pause_down_s=settings.pause_down_seconds,
            ),
            scaler=name,
            dropped=lambda: self._follower.first_sequence - 1,
            first_roles=settings.roles,
        )
        self._decided_at: Sequence = 0
        self._log_checked_at = clock.wall()
        self._board = board
        self._size_read_at: WallSeconds | None = None
        """Here, or at another scaler, which then only follows."""
        self._read_here = False
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
        while True:
            await self._leadership.obtain(term_of_log=self._term_of_log)
            log.info("scaler_active", policy=self._decider.policy.name, provider=self._runner.provider.name)
            try:
                async with (
                    self._commands.serve(admin_subject(self._pool, "scale", ANY_ACTOR), self._on_scale),
                    asyncio.TaskGroup() as tenure,
                ):
                    tenure.create_task(self._keep_lease(), name="keep-lease")
                    tenure.create_task(self._tick_repeatedly(), name="ticks")
            except* LeaseLostError as lost:
                log.warning("scaler_standby", reason=str(lost.exceptions[0]))

    async def resign(self) -> None:
        """Release the lease; the next holder continues unfinished steps."""
        await self._leadership.resign()

    def desired(self) -> bytes | None:
        """Page for autoscalers that start engines themselves (KEDA's `metrics-api`). None before the first decision, which
        is not zero instances. Who reads it acts on it, so that operators may set the size, too."""
        self._size_read_at, self._read_here = self._clock.wall(), True
        decided = self.state.scaling.decided
        if decided is None or not self._follower.caught_up:
            return None
        page = {
            "pool": self._pool,
            "desired": decided.wanted,
            "ready": len(in_service(self.state)),
            "number": decided.number,
            "reason": decided.reason,
        }
        if decided.prefill:
            page |= {"prefill": decided.prefill, "decode": decided.decode}
        return json.dumps(page).encode()

    async def pass_on_reads(self) -> None:
        """Several scalers stand behind one address, so autoscalers may read this one while another acts. Runs without end."""
        while True:
            is_read, self._read_here = self._read_here, False
            if is_read and not self.acts:
                await self._tell_acting()
            await self._clock.sleep_wall(REPORT_WALL_SECONDS)

    async def report(self) -> None:
        reported: Counter[Status] = Counter()
        while True:
            sizes = pool_sizes(self.state)
            if self.state.scaling.is_applied:
                self._board.restored(SIZE)
            wanted = self._wanted or self.state.scaling.wanted  # a pool whose engines are all gone is not asleep
            if wanted is not None:
                telemetry.SCALER_DESIRED_ENGINES.labels(self._pool).set(wanted)
                for role, count in asdict(_decided_roles(self.state)).items():
                    telemetry.SCALER_DESIRED_ROLES.labels(self._pool, role).set(count)
            if sizes != reported:
                log.info("pool_size", total=sizes.total(), **{status.value: sizes[status] for status in sorted(sizes)})
            reported = sizes
            await self._clock.sleep_wall(REPORT_WALL_SECONDS)

    async def measure(self) -> None:
        """Runs without end."""
        await measure_log(self._log, self._clock, self._pool, lambda: self.state.sequence)

    def _on_event(self, event: LogEvent) -> None:
        if isinstance(event, ScaleDecided) and event is self.state.scaling.decided:
            self._decided_at = self.state.sequence

    def _term_of_log(self) -> Term | None:
        if not self._follower.caught_up:
            return None
        return Term(0 if self.state.scaling.decided is None else 1)

    async def _tell_acting(self) -> None:
        """Not repeated: the next read is told again."""
        subject = admin_subject(self._pool, "scale", SCALER_ACTOR)
        with contextlib.suppress(NoResponderError, CommandTimeoutError):
            await self._commands.request(subject, ScalePool(size_read=True), timeout=REPORT_WALL_SECONDS)

    async def _keep_lease(self) -> None:
        raise LeaseLostError(await self._leadership.keep(deposed=lambda: ""))

    async def _tick_repeatedly(self) -> None:
        while True:
            with contained("scaling"):
                if self.acts and self._follower.caught_up and self._commands.connected:
                    await self._tick()
            await self._clock.sleep_wall(TICK_WALL_SECONDS)

    async def _tick(self) -> None:
        try:
            if await self._decide():
                await self._reconcile()
        except ProviderError as error:
            self._runner.fail(str(error))

    async def _decide(self) -> bool:
        """Whether what was decided, if anything, is in the log. Raises ProviderError."""
        absent = await self._runner.absent(self.state) if self.state.scaling.wanted is None else 0
        decision = self._decider.decide(self.state, self._clock.now(), absent=absent)
        if decision is None and await self._may_be_lost():
            decision = self._decider.repeated(self.state, self._clock.now())
        return decision is None or await self._write(decision)

    async def _reconcile(self) -> None:
        wanted = self.state.scaling.wanted
        if wanted is None:
            return
        steps = await self._runner.steps(self.state, wanted, _decided_roles(self.state))
        await self._take(steps)
        status = self._runner.status
        self._advise(self._by_hand(self._wanted or 0))
        if not steps and status is not None and status.settled(wanted):
            self._runner.forget_failures()
            if not self.state.scaling.is_applied:
                await self._append_applied(status, wanted)

    async def _take(self, steps: list[Step]) -> None:
        """One that fails does not hold up the others."""
        failed: list[str] = []
        for step in steps:
            if self.acts:
                try:
                    await self._runner.take(step)
                except ProviderError as error:
                    failed.append(str(error))
        if failed:
            self._runner.fail("; ".join(failed))

    @property
    def _nobody_acts(self) -> bool:
        read_at = self._size_read_at
        read = read_at is not None and self._clock.wall() - read_at < AUTOSCALER_WALL_SECONDS
        return not self._runner.provider.manages and not read

    @property
    def _is_any_size_wanted(self) -> bool:
        """Nobody asked for a size and nobody acts on one."""
        decided = self.state.scaling.decided
        unasked = decided is not None and self._decider.policy.name == Manual.name and not decided.by
        return unasked and self._nobody_acts

    @property
    def _wanted(self) -> int | None:
        """As decided, or as many as there are."""
        return len(staying(self.state.fleet)) if self._is_any_size_wanted else self.state.scaling.wanted

    @property
    def _reason(self) -> str:
        if self._is_any_size_wanted:
            return "nobody asked for a size: all that are not drained"
        decided = self.state.scaling.decided
        return decided.reason if decided else ""

    def _by_hand(self, wanted: int) -> str:
        """What people have to do for this size, or ""."""
        present = len(staying(self.state.fleet))
        if present == wanted or not self._nobody_acts:
            return ""
        verb, count = ("start", wanted - present) if wanted > present else ("stop", present - wanted)
        return (
            f"the provider '{self._runner.provider.name}' starts and stops no engines, and no autoscaler reads GET /desired: "
            f"{present} are there; {verb} {count} by hand"
        )

    def _advise(self, advice: str) -> None:
        """Logs a change only, since it is called at every tick."""
        if advice and advice != self._advice:
            log.warning("manual_scaling_required", please=advice)
        self._advice = advice

    async def _may_be_lost(self) -> bool:
        """Whether the newest decision is in the older half of a log that drops entries. Rarely queried."""
        if self._clock.wall() - self._log_checked_at < LOG_CHECK_WALL_SECONDS:
            return False
        self._log_checked_at = self._clock.wall()
        try:
            extent = await self._log.extent()
        except (LogUnavailableError, LogMissingError):
            return False
        return extent.first > 1 and self._decided_at < (extent.first + extent.last) / 2

    async def _append_applied(self, status: PoolStatus, wanted: int) -> None:
        names = ", ".join(sorted(instance.id for instance in status.staying))
        await self._append(
            ScaleApplied(
                at=self._clock.now(),
                current=status.in_service,
                wanted=wanted,
                detail=f"in service: {names}"[:1000],
                number=self.state.scaling.number,
                scaler=self._name,
            )
        )

    async def _write(self, decision: ScaleDecided) -> bool:
        """Append a decision; returns whether it came back through the log."""
        log.info("scale_decided", current=decision.current, wanted=decision.wanted, reason=decision.reason)
        if not self.acts or not await self._append(decision):
            return False
        deadline = self._clock.wall() + READ_BACK_WALL_SECONDS
        while self.state.scaling.number < decision.number:
            if self._clock.wall() > deadline:
                return False
            await self._clock.sleep_wall(WallSeconds(0.01))
        return True

    async def _append(self, event: ScaleDecided | ScaleApplied) -> bool:
        try:
            await self._log.append(event)
        except LogUnavailableError as error:
            self._runner.fail(f"the log does not answer: {error}")
            return False
        except UnwritableError as error:
            self._runner.fail(str(error))
            return False
        return True

    async def _on_scale(self, command: AnyCommand, reply: Reply) -> None:
        if not self.acts:
            return
        if not isinstance(command, ScalePool):
            if (unread := refusal_of(command, (ScalePool,))) is not None:
                await reply(unread)
            return
        if command.size_read:
            self._size_read_at = self._clock.wall()
        refusal = ""
        roles, wanted = RoleSizes(command.prefill or 0, command.decode or 0), command.wanted
        if roles.total:
            wanted = roles.total
        if wanted is not None:
            actor = actor_of(reply.subject)
            refusal = (
                self._decider.bounds_refusal(wanted)
                or role_refusal(self.state, roles)
                or self._size_refusal(wanted)
                or await self._decide_for_operator(wanted, roles, command.asker, actor)
            )
            log_admin_action("scale", actor, refusal, wanted=wanted, prefill=roles.prefill, decode=roles.decode)
        await reply(self._answer(refusal))

    def _size_refusal(self, wanted: int) -> str:
        by_hand = self._by_hand(wanted)
        return by_hand and f"{by_hand}, or run the scaler with a provider that does (pointsman up --instances MIN..MAX)"

    @property
    def _is_applied(self) -> bool:
        """Also before the log says so, within a tick."""
        wanted, status = self._wanted, self._runner.status
        if self.state.scaling.is_applied or status is None or wanted is None:
            return self.state.scaling.is_applied
        switches = status.switching or role_switches(self.state, _decided_roles(self.state))
        return status.settled(wanted) and not switches

    async def _decide_for_operator(self, wanted: int, roles: RoleSizes, asker: str, actor: str) -> str:
        """Returns why it was not decided, or "". A repeated request is decided once."""
        state = self.state
        if wanted == state.scaling.wanted and roles in (NOT_SIZED, wanted_roles(state)):
            return ""
        decision = self._decider.operator_decision(
            state, wanted, asker=asker, actor=actor, now=self._clock.now(), roles=roles
        )
        if not await self._write(decision):
            return "the log does not take it in at the moment; ask again"
        if state.scaling.wanted != wanted or (roles.total and wanted_roles(state) != roles):
            return f"{state.scaling.wanted} was decided at the same moment; ask again"
        return ""

    def _answer(self, refusal: str) -> ScaleAnswered:
        scaling, status, wanted = self.state.scaling, self._runner.status, self._wanted
        roles = _decided_roles(self.state)
        return ScaleAnswered(
            number=scaling.number,
            wanted=wanted or 0,
            ready=status.in_service if status else 0,
            coming=len(status.coming) if status else 0,
            leaving=len(status.leaving) if status else 0,
            applied=self._is_applied,
            policy=self._decider.policy.name,
            provider=self._runner.provider.name,
            lowest=self._decider.limits.lowest,
            highest=self._decider.limits.highest,
            reason=self._reason,
            trouble=self._runner.error,
            refusal=refusal,
            prefill=roles.prefill,
            decode=roles.decode,
            switching=status.switching if status else 0,
            by_hand="" if wanted is None else self._by_hand(wanted),
            drained=[i.id for i in drained_by_operators(self.state.fleet)],
        )


def _decided_roles(state: State) -> RoleSizes:
    decided = state.scaling.decided
    return RoleSizes(decided.prefill, decided.decode) if decided else NOT_SIZED


def role_refusal(state: State, roles: RoleSizes) -> str:
    """Why the pool cannot have these roles, or ""."""
    fixed = fixed_sizes(state.fleet)
    if not roles.total:
        return ""
    if not roles.prefill or not roles.decode:
        return "each role needs at least one instance"
    if any(i.role == "both" and not i.role_switching for i in state.fleet.instances):
        return "instances that prefill and decode cannot change their role: start workers with --role-switching"
    if fixed.prefill > roles.prefill or fixed.decode > roles.decode:
        return f"{fixed.prefill} prefill and {fixed.decode} decode instances cannot change their role"
    return ""


def pool_sizes(state: State) -> Counter[Status]:
    return Counter(instance.status for instance in state.fleet.instances)
