"""Takes the reconciler's steps: provider calls, and drain commands to the leader."""

import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.commands import DrainAnswered, DrainInstance, UndrainInstance
from pointsman.contracts.subjects import SCALER_ACTOR, admin_subject
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, Switch
from pointsman.ports import (
    Clock,
    Commands,
    CommandTimeoutError,
    InstanceProvider,
    NoResponderError,
    ProvidedInstance,
    ProviderError,
    unix_now,
)
from pointsman.primitives import InstanceId, PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman_scaler.reconciler import (
    Drain,
    Grow,
    PoolStatus,
    Report,
    Step,
    Stop,
    Undrain,
    absent,
    next_steps,
    out_of_service,
    pool_status,
    requests_at,
    with_ranks,
)
from pointsman_scaler.settings import ScalerSettings

log = structlog.get_logger()

COMMAND_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
SETTLE_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
"""Minimum drain before an instance counts as idle: two worker reports."""
EARLIER_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""For so long after a start, an earlier instance of its name may look as if it were in service."""
GROWTH_WAIT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
GROWTH_WAIT_WALL_SECONDS_MAX: WallSeconds = WallSeconds(60.0)
LEAVING_REASON = "the pool shrinks"
SWITCHING_REASON = "its role changes"


class StepRunner:
    def __init__(self, provider: InstanceProvider, commands: Commands, clock: Clock, settings: ScalerSettings) -> None:
        self.provider = provider
        self.status: PoolStatus | None = None
        self._commands = commands
        self._clock = clock
        self._settings = settings
        telemetry.SCALER_ERRORS.show_zeros(pool=settings.pool)
        self._leaving_since: dict[InstanceId, WallSeconds] = {}
        self._out_since: dict[InstanceId, WallSeconds] = {}
        self._served_at: dict[InstanceId, WallSeconds] = {}
        """When instances that run were last in service, as far as this scaler has seen."""
        self._error = self._logged_error = ""
        self._failed = False
        self._growth_error = ""
        """Until the next attempt."""
        self._grows_after = WallSeconds(0.0)
        self._growth = Backoff(GROWTH_WAIT_WALL_SECONDS, GROWTH_WAIT_WALL_SECONDS_MAX)

    @property
    def error(self) -> str:
        """What failed in the last tick, or when instances were started last."""
        return self._error or self._growth_error

    async def steps(self, state: State, wanted: int, roles: RoleSizes = NOT_SIZED) -> list[Step]:
        """Empty if the pool is as wanted, already changing, or changed by others. Raises ProviderError."""
        provided = await self.provider.running()
        if ranked := with_ranks(state, provided):
            refused = (
                f"{ranked[0]} has several data-parallel ranks, and each rank is an instance: the provider "
                f"'{self.provider.name}' cannot size such a pool; run the scaler with --provider static"
            )
            raise ProviderError(refused)
        status = self.status = self._pool_status(state, provided)
        steps = next_steps(
            state,
            status,
            wanted=wanted,
            roles=roles,
            stoppable=self.provider.stoppable,
            may_stop=lambda instance: self._may_stop(state, instance),
            highest=self._settings.max_instances,
        )
        if not any(isinstance(step, Grow) for step in steps):
            self._growth_error = ""
        return [step for step in steps if self.provider.manages or not isinstance(step, Grow)]

    async def absent(self, state: State) -> int:
        """Instances that run and are not in the fleet. Raises ProviderError."""
        return len(absent(state, await self.provider.running()))

    async def take(self, step: Step) -> None:
        """Raises ProviderError."""
        match step:
            case Grow():
                await self._grow(step)
            case Drain():
                await self._command_leader(DrainInstance(instance=step.instance, reason=LEAVING_REASON, leaving=True))
            case Undrain() | Switch(undo=True):
                await self._command_leader(UndrainInstance(instance=step.instance))
            case Switch():
                await self._command_leader(
                    DrainInstance(instance=step.instance, reason=SWITCHING_REASON, becomes=step.role)
                )
            case Stop():
                log.info("instance_stopping", instance=step.instance, reason=step.reason)
                await self.provider.stop(step.instance)
            case Report():
                raise ProviderError(step.trouble)

    def forget_growth(self) -> None:
        """The pool has its size: the next growth need not wait."""
        self._growth.reset()
        self._grows_after = WallSeconds(0.0)

    def end_tick(self) -> None:
        """What did not fail again is over."""
        if not self._failed:
            self._error = ""
        if not self.error:
            self._logged_error = ""
        self._failed = False

    def fail(self, error: str) -> None:
        telemetry.SCALER_ERRORS.labels(self._settings.pool).inc()
        if error != self._logged_error:
            log.warning("scaler_error", trouble=error)
        self._error = self._logged_error = error
        self._failed = True

    async def _grow(self, step: Grow) -> None:
        wall = self._clock.wall()
        if wall < self._grows_after:
            return
        self._grows_after = wall + self._growth.next_wait()
        log.info("scale_up_started", missing=step.missing, provider=self.provider.name)
        try:
            await self.provider.grow(step.total)
        except ProviderError as error:
            self._growth_error = str(error)
            raise
        self._growth_error = ""

    def _pool_status(self, state: State, provided: list[ProvidedInstance]) -> PoolStatus:
        wall = self._clock.wall()
        out = {p.instance for p in out_of_service(state, provided)}
        since = self._out_since = {instance: self._out_since.get(instance, wall) for instance in out}
        status = pool_status(
            state,
            provided,
            start_seconds_max=self._settings.start_seconds_max,
            out_seconds=lambda instance: wall - since[instance],
            unix_now=unix_now(self._clock),
            served=self._served(state, provided, wall),
        )
        self._leaving_since = {i.id: self._leaving_since.get(i.id, wall) for i in status.leaving}
        return status

    def _served(self, state: State, provided: list[ProvidedInstance], wall: WallSeconds) -> set[InstanceId]:
        """Since their start."""
        now_serving = {instance.id: wall for instance in in_service(state)}
        known = self._served_at | now_serving
        self._served_at = {p.instance: known[p.instance] for p in provided if p.instance in known}
        ages = {p.instance: p.age for p in provided}
        return {
            instance
            for instance, served_at in self._served_at.items()
            if float(wall - served_at) < ages[instance] - float(EARLIER_WALL_SECONDS)
        }

    async def _command_leader(self, command: DrainInstance | UndrainInstance) -> None:
        subject = admin_subject(PoolName(self._settings.pool), "drain", SCALER_ACTOR)
        try:
            answer = await self._commands.request(subject, command, timeout=COMMAND_WALL_SECONDS)
        except (NoResponderError, CommandTimeoutError) as error:
            self.fail(f"no scheduler took in that {command.instance} drains: {error}")
            return
        if isinstance(answer, DrainAnswered) and answer.refusal:
            self.fail(answer.refusal)
            return
        log.info("drain_requested", command=type(command).__name__, instance=command.instance)

    def _may_stop(self, state: State, instance: Instance) -> str:
        """Why a leaving instance may be stopped now, or ""."""
        drained = self._clock.wall() - self._leaving_since.get(instance.id, self._clock.wall())
        requests = requests_at(state, instance.id)
        if drained > self._settings.drain_seconds_max:
            return f"{requests} requests have not finished in {drained:.0f} s"
        if drained < SETTLE_WALL_SECONDS or requests or instance.running or instance.waiting:
            return ""
        return "it is idle"
