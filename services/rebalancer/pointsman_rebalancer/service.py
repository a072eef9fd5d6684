"""Folds the log, plans moves of pending requests, and sends plans to the leader, which decides each move. Waits for the
log to reach the answer of the leader, so that no move is repeated. Has no index: it plans with the hits that placements
recorded or promised, and the leader judges by its own."""

import asyncio
from dataclasses import replace

import structlog

from pointsman.adapters.waiting import wait_at_most
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import MigrateRequests, MigrationAnswered, PlannedMove
from pointsman.contracts.decisions import LeaderElected, RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import FleetEvent
from pointsman.contracts.requests import PrefillFinished
from pointsman.contracts.subjects import command_subject
from pointsman.policies.rebalancing import MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.base import Migration
from pointsman.policies.rebalancing.off import Off
from pointsman.policies.rebalancing.redispatch import Redispatching, Window
from pointsman.ports import Clock, CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import EngineSeconds, PoolName, RequestId, Sequence, Term, WallSeconds, engine_seconds
from pointsman.runtime import telemetry
from pointsman.runtime.containment import contained
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.leader_clock import LeaderClock
from pointsman.runtime.log_follower import LogFollower
from pointsman.state.state import PoolSettings, State
from pointsman_rebalancer.settings import RebalancerSettings

log = structlog.get_logger()

DEBOUNCE_WALL_SECONDS: WallSeconds = WallSeconds(0.005)
PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(0.1)
PLANNING_SHARE_MAX = 0.2
ANSWER_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
SETTLED_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""Time for the log to reach the leader's answer."""
REFUSED_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""A request whose move was refused is left out so long: the leader knows better, and each refusal is an entry of the log."""
HITS_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
"""How long before its start a request was placed whose hits it knows; of those that wait longer it knows none."""

TRIGGERS = (RequestPlaced, RequestMigrated, PrefillFinished, FleetEvent)
"""Events that may overload an instance or make room."""


class RebalancerService:
    def __init__(
        self,
        *,
        link: Link,
        clock: Clock,
        board: HealthBoard,
        settings: RebalancerSettings,
        policy: RebalancingPolicy,
        name: str,
    ) -> None:
        """`name`: of this process in the ids of its plans; never reused."""
        pool = PoolSettings(block_tokens=settings.block_tokens, speed=settings.speed)
        self._follower = LogFollower(
            link.log,
            link.checkpoints,
            clock=clock,
            board=board,
            settings=pool,
            on_event=self._on_event,
            history=engine_seconds(HITS_WALL_SECONDS, settings.speed),
        )
        self._pool = PoolName(settings.pool)
        self._commands = link.commands
        telemetry.REBALANCING_REACTION_SECONDS.labels(self._pool)
        for metric in (telemetry.MIGRATION_PLANS, telemetry.MIGRATIONS_PLANNED):
            metric.show_zeros(pool=self._pool, policy=policy.name)
        self._clock = clock
        self._leader_clock = LeaderClock(clock, lambda: self._follower.state)
        self._policy = policy
        self._rebind = settings.rebind
        self._window = Window()
        self._name = name
        self._subject = command_subject(self._pool, "migrate")
        self._plans = 0
        self._trigger_at: EngineSeconds | None = None
        """Engine time of the first trigger since the last plan."""
        self._triggered = asyncio.Event()
        self._entry_read = asyncio.Event()
        self._newest_decision: tuple[Term, int] = (Term(0), 0)
        """Newest decision read from the log."""
        self._refused: dict[RequestId, WallSeconds] = {}
        """When the leader refused to move it."""

    @property
    def state(self) -> State:
        return self._follower.state

    @property
    def first_sequence(self) -> Sequence:
        """Of the state; above 1 the log has lost earlier entries, and no checkpoint has them."""
        return self._follower.first_sequence

    async def run(self) -> None:
        await self._follower.run()

    async def rebalance(self) -> None:
        """Returns at once with the policy `off` and no redispatch."""
        if isinstance(self._policy, Off) and not self._rebind:
            return
        while True:
            await wait_at_most(self._triggered, PERIOD_WALL_SECONDS)
            await self._clock.sleep_wall(DEBOUNCE_WALL_SECONDS)
            started = self._clock.wall()
            plan, trigger_at = MigrationPlan(self.state.sequence), None
            with contained("planning"):
                plan, trigger_at = self._plan()
            planning = self._clock.wall() - started
            telemetry.MIGRATION_PLANNING_SECONDS.labels(self._pool).observe(float(planning))
            with contained("plan"):
                if plan.migrations:
                    await self._request_moves(plan, trigger_at)
            await self._clock.sleep_wall(planning * (1 / PLANNING_SHARE_MAX - 1))

    def _on_event(self, event: LogEvent) -> None:
        stamp = event.stamp
        if stamp is not None:
            self._newest_decision = max(self._newest_decision, (stamp.term, stamp.number))
        self._leader_clock.note(event)
        if isinstance(event, LeaderElected):
            self._window = _window_of(event)
        if isinstance(event, TRIGGERS):
            if self._trigger_at is None:
                self._trigger_at = event.at
            self._triggered.set()
        self._entry_read.set()

    def _plan(self) -> tuple[MigrationPlan, EngineSeconds | None]:
        """Returns a plan and the time of its trigger; empty before the log is read."""
        trigger_at, self._trigger_at = self._trigger_at, None
        self._triggered.clear()
        state = self.state
        if not self._follower.caught_up:
            return MigrationPlan(state.sequence), None
        now = self._leader_clock.now()
        plan = self._policy.plan(state, now)
        if self._rebind:
            busy = {migration.target for migration in plan.migrations}
            rebinds = Redispatching(state, now, self._window).plan(busy=busy)
            plan = replace(plan, migrations=(*plan.migrations, *rebinds))
        plan = replace(plan, migrations=self._without_refused(plan.migrations))
        self._plans += bool(plan.migrations)
        return replace(plan, id=f"{self._name}.{self._plans}", policy=self._policy.name), trigger_at

    def _without_refused(self, moves: tuple[Migration, ...]) -> tuple[Migration, ...]:
        since = self._clock.wall() - REFUSED_WALL_SECONDS
        self._refused = {request: at for request, at in self._refused.items() if at > since}
        return tuple(move for move in moves if move.request not in self._refused)

    async def _request_moves(self, plan: MigrationPlan, trigger_at: EngineSeconds | None) -> None:
        telemetry.MIGRATIONS_PLANNED.labels(self._pool, plan.policy).inc(len(plan.migrations))
        try:
            answer = await self._commands.request(
                self._subject, _command(plan, self.state.term), timeout=ANSWER_WALL_SECONDS
            )
        except (NoResponderError, CommandTimeoutError) as error:
            telemetry.MIGRATION_PLANS.labels(self._pool, plan.policy, "unanswered").inc()
            log.info("migration_plan_unanswered", plan=plan.id, problem=str(error))
            await self._clock.sleep_wall(PERIOD_WALL_SECONDS)
            return
        if not isinstance(answer, MigrationAnswered):
            log.error("answer_unexpected", plan=plan.id, answer=type(answer).__name__)
            return
        self._record(plan, answer, trigger_at)
        await self._until_read(answer.as_of, (answer.term, answer.decided))

    def _record(self, plan: MigrationPlan, answer: MigrationAnswered, trigger_at: EngineSeconds | None) -> None:
        telemetry.MIGRATION_PLANS.labels(self._pool, plan.policy, answer.refusal or "taken").inc()
        now, refused = self._clock.wall(), [move.request for move in answer.moves if move.refusal]
        self._refused.update(dict.fromkeys(refused, now))
        applied = len(answer.moves) - len(refused)
        if applied and trigger_at is not None:
            reaction = (self._leader_clock.now() - trigger_at) / self._clock.speed
            telemetry.REBALANCING_REACTION_SECONDS.labels(self._pool).observe(max(0.0, reaction))
        log.info(
            "planned",
            plan=plan.id,
            as_of=plan.as_of,
            applied=applied,
            refused=len(refused),
            refusal=answer.refusal or None,
        )

    async def _until_read(self, as_of: Sequence, decision: tuple[Term, int]) -> None:
        """Bounded: a leader may die before it has written."""
        deadline = self._clock.wall() + SETTLED_WALL_SECONDS
        while (self.state.sequence < as_of or self._newest_decision < decision) and self._clock.wall() < deadline:
            self._entry_read.clear()
            await wait_at_most(self._entry_read, deadline - self._clock.wall())


def _command(plan: MigrationPlan, term: Term) -> MigrateRequests:
    return MigrateRequests(
        plan=plan.id,
        policy=plan.policy,
        term=term,
        as_of=plan.as_of,
        moves=[
            PlannedMove(
                request=m.request, source=m.source, target=m.target, benefit=m.benefit, reason=m.reason, rebind=m.rebind
            )
            for m in plan.migrations
        ],
    )


def _window_of(elected: LeaderElected) -> Window:
    settings, usual = elected.settings, Window()
    return Window(
        int(settings.get("prefill_window_tokens", usual.tokens)), int(settings.get("running_max", usual.running_max))
    )
