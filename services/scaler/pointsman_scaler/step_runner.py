"""Takes the reconciler's steps: provider calls, and drain commands to the leader."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

import structlog

from pointsman.adapters.backoff import Backoff
from pointsman.contracts.codec import short_reason
from pointsman.contracts.commands import DrainAnswered, DrainInstance, UndrainInstance
from pointsman.contracts.subjects import SCALER_ACTOR, admin_subject
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, Switch, drained_by_operators
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
from pointsman_scaler.trouble import Trouble

log = structlog.get_logger()

COMMAND_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
SETTLE_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
"""Minimum drain before an instance counts as idle: two worker reports."""
EARLIER_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
"""For so long after a start, an earlier instance of its name may look as if it were in service."""
PROVIDER_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
"""For a call of the provider. To stop a process takes up to 52 s."""
LISTED_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
"""Until the provider lists what it was asked to start, though nothing of it answers yet."""
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
RETRY_WALL_SECONDS_MAX: WallSeconds = WallSeconds(60.0)
LEAVING_REASON = "the pool shrinks"
SWITCHING_REASON = "its role changes"

T = TypeVar("T")


class _Attempts:
    """At something that may fail again and again."""

    def __init__(self) -> None:
        self.error = ""
        """Of the last one."""
        self.next_at = WallSeconds(0.0)
        self._backoff = Backoff(RETRY_WALL_SECONDS, RETRY_WALL_SECONDS_MAX)

    def note(self, wall: WallSeconds, error: str = "") -> None:
        self.error = error
        self.next_at = wall + self._backoff.next_wait()


class StepRunner:
    def __init__(self, provider: InstanceProvider, commands: Commands, clock: Clock, settings: ScalerSettings) -> None:
        self.provider = provider
        self.status: PoolStatus | None = None
        self._commands = commands
        self._clock = clock
        self._settings = settings
        self.trouble = Trouble(settings.pool)
        self._leaving_since: dict[InstanceId, WallSeconds] = {}
        self._out_since: dict[InstanceId, WallSeconds] = {}
        self._served_at: dict[InstanceId, WallSeconds] = {}
        """When instances that run were last in service, as far as this scaler has seen."""
        self._growth = _Attempts()
        self._missing_since: WallSeconds | None = None
        """Since when each pass has had to start some."""
        self._stops: dict[InstanceId, _Attempts] = {}
        """That have failed and are still to be done."""

    @property
    def error(self) -> str:
        """What failed in the last pass, or when instances were started or stopped last."""
        return self.trouble.error or self._lasting

    async def steps(self, state: State, wanted: int, roles: RoleSizes = NOT_SIZED) -> list[Step]:
        """Empty if the pool is as wanted, already changing, or changed by others. Those that the leader takes come first, and
        stops that have failed before come last: each may take long. Raises ProviderError."""
        provided = await self._answered(self.provider.running())
        if ranked := with_ranks(state, provided):
            raise ProviderError(
                f"{ranked[0]} has several data-parallel ranks, and each rank is an instance: the provider "
                f"'{self.provider.name}' cannot size such a pool; run the scaler with --provider static"
            )
        if troubled := [p for p in provided if p.problem]:
            first, count = troubled[0], len(troubled)
            self.trouble.note(
                short_reason(f"{count} of {len(provided)} engines do not start; {first.instance}: {first.problem}")
            )
        status = self.status = self._pool_status(state, provided)
        steps = next_steps(
            state,
            status,
            wanted=wanted,
            roles=roles,
            stoppable=lambda running: self._stoppable(status, running),
            may_stop=lambda instance: self._may_stop(state, instance),
            highest=self._settings.max_instances,
        )
        if not any(isinstance(step, Grow) for step in steps):
            self._growth.error, self._missing_since = "", None
        taken = [step for step in steps if self.provider.manages or not isinstance(step, Grow)]
        taken.sort(key=lambda step: not isinstance(step, Drain | Undrain | Switch))
        taken += self._stops_again(status)
        waiting = {i for i in status.provided if self._waits_for_stop(i)}
        stopped = {step.instance for step in taken if isinstance(step, Stop)}
        self._stops = {i: attempts for i, attempts in self._stops.items() if i in waiting | stopped}
        return taken

    def unreplaced(self, state: State) -> int:
        """Instances that hang or that operators drained, where nobody stops them or starts others."""
        if self.provider.manages or self.status is None:
            return 0
        return len(self.status.overdue) + len(drained_by_operators(state.fleet))

    async def absent(self, state: State) -> int:
        """Instances that run and are not in the fleet. Raises ProviderError."""
        return len(absent(state, await self._answered(self.provider.running())))

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
                await self._stop(step)
            case Report():
                raise ProviderError(step.trouble)

    def forget_growth(self) -> None:
        """The pool has its size: the next growth need not wait."""
        self._growth = _Attempts()

    def forget_failures(self) -> None:
        """Another scaler acts."""
        self.status = None
        self._growth, self._stops = _Attempts(), {}
        self.trouble.forget()

    def end_pass(self) -> None:
        self.trouble.end_pass(lasting=self._lasting)

    @property
    def _lasting(self) -> str:
        return next((attempts.error for attempts in (self._growth, *self._stops.values()) if attempts.error), "")

    def _stoppable(self, status: PoolStatus, running: list[InstanceId]) -> list[InstanceId]:
        """Without an overdue one whose stop has failed: another is started beside it."""
        failed = {i for i in self._stops if i in status.overdue or self._waits_for_stop(i)}
        return [instance for instance in self.provider.stoppable(running) if instance not in failed]

    def _stops_again(self, status: PoolStatus) -> list[Step]:
        due = [i for i in self._stops if i in status.overdue and not self._waits_for_stop(i)]
        stoppable = self.provider.stoppable(list(status.provided)) if due else []
        return [Stop(instance, status.overdue[instance]) for instance in due if instance in stoppable]

    def _waits_for_stop(self, instance: InstanceId) -> bool:
        return instance in self._stops and self._clock.wall() < self._stops[instance].next_at

    async def _grow(self, step: Grow) -> None:
        wall = self._clock.wall()
        if wall < self._growth.next_at:
            return
        self._growth.note(wall)
        since = self._missing_since = wall if self._missing_since is None else self._missing_since
        log.info("scale_up_started", missing=step.missing, provider=self.provider.name)
        try:
            await self._answered(self.provider.grow(step.total))
        except ProviderError as error:
            self._growth.error = str(error)
            raise
        if wall - since > LISTED_WALL_SECONDS:
            self._growth.error = (
                f"the provider '{self.provider.name}' says that it starts engines, and still lists {step.total - step.missing} of "
                f"{step.total}: look there for what keeps it from starting them, for instance a quota"
            )
            raise ProviderError(self._growth.error)

    async def _stop(self, step: Stop) -> None:
        log.info("instance_stopping", instance=step.instance, reason=step.reason)
        try:
            await self._answered(self.provider.stop(step.instance))
        except ProviderError as error:
            self._stops.setdefault(step.instance, _Attempts()).note(self._clock.wall(), str(error))
            raise
        self._stops.pop(step.instance, None)

    async def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        """Raises ProviderError, also if there is no answer in time."""
        try:
            async with asyncio.timeout(float(PROVIDER_WALL_SECONDS)):
                return await call
        except TimeoutError as error:
            raise ProviderError(
                f"the provider '{self.provider.name}' has not answered for {PROVIDER_WALL_SECONDS:.0f} s"
            ) from error

    def _pool_status(self, state: State, provided: list[ProvidedInstance]) -> PoolStatus:
        wall, manages = self._clock.wall(), self.provider.manages
        if not manages:
            provided = [ProvidedInstance(instance.id, inf) for instance in state.fleet.instances]
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
        return status if manages else replace(status, provided=())

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
            self.trouble.note(f"no scheduler took in that {command.instance} drains: {error}")
            return
        if isinstance(answer, DrainAnswered) and answer.refusal:
            self.trouble.note(answer.refusal)
            return
        log.info("drain_requested", command=type(command).__name__, instance=command.instance)

    def _may_stop(self, state: State, instance: Instance) -> str:
        """Why a leaving instance may be stopped now, or ""."""
        if self._waits_for_stop(instance.id):
            return ""
        drained = self._clock.wall() - self._leaving_since.get(instance.id, self._clock.wall())
        requests = requests_at(state, instance.id)
        if drained > self._settings.drain_seconds_max:
            return f"{requests} requests have not finished in {drained:.0f} s"
        if drained < SETTLE_WALL_SECONDS or requests or instance.running or instance.waiting:
            return ""
        return "it is idle"
