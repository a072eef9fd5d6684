"""The processes of a fleet by role. Only the composition roots of their `main` are repeated, because those open
sockets."""

import asyncio
from itertools import pairwise
from typing import cast

import aiohttp
from typing_extensions import override

from pointsman.adapters.clocks import ForwardClock
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.decisions import RequestMigrated
from pointsman.policies.policy_set import scaling_policy
from pointsman.ports import EngineTarget, InstanceProvider
from pointsman.primitives import InstanceId, RequestId, WallSeconds
from pointsman.runtime.health import SHUTDOWN_PART
from pointsman.runtime.supervision import Supervisor
from pointsman_ingress.assembly import assembled
from pointsman_ingress.settings import IngressSettings
from pointsman_lab.torture.archive import MemoryArchive
from pointsman_lab.torture.engine_host import EngineHost, HostProbe, MemorySockets
from pointsman_lab.torture.engines import RunningEngine
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.http import Session
from pointsman_lab.torture.loop import InPlace
from pointsman_lab.torture.network import LinkConditions
from pointsman_lab.torture.processes import HttpProcess, Process, ProcessRun
from pointsman_rebalancer.service import RebalancerService
from pointsman_rebalancer.settings import RebalancerSettings, chosen_policy
from pointsman_recorder.service import Recorder
from pointsman_scaler.providers import chosen_provider
from pointsman_scaler.service import ScalerService
from pointsman_scaler.settings import ScalerSettings
from pointsman_scheduler.checkpointer import checkpointer_over
from pointsman_scheduler.checkpointing import Cadence
from pointsman_scheduler.context import SchedulerContext
from pointsman_scheduler.service import SchedulerService, start_scheduler
from pointsman_worker.service import WorkerService
from pointsman_worker.settings import WorkerSettings

PROBES = "probe-"


class SchedulerProcess(Process):
    date_may_be_wrong = False  # dates of two leaders are not compared
    service: SchedulerService

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        settings = self.environment.plan.scheduler
        context = SchedulerContext(
            settings=settings,
            policies=settings.policies(),
            link=self.link.ports,
            clock=ForwardClock(self.clock),
            board=run.board,
            name=self.link.name,
        )
        self.service = start_scheduler(supervisor, context)

    @override
    async def shut_down(self, supervisor: Supervisor) -> None:
        await self.service.resign()


class CheckpointerProcess(Process):
    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        settings = self.environment.plan.scheduler
        cadence = Cadence(seconds=settings.checkpoint_seconds)
        checkpointer = checkpointer_over(self.link.ports, settings, clock=self.clock, board=run.board, cadence=cadence)
        supervisor.start(checkpointer.run(), name="checkpoints")


class WorkerProcess(Process):
    service: WorkerService

    def __init__(self, environment: Environment, name: str, host: EngineHost) -> None:
        super().__init__(environment, name)
        self.host = host

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        plan, host = self.environment.plan, self.host
        service = self.service = WorkerService(
            link=self.link.ports,
            clock=self.clock,
            board=run.board,
            settings=WorkerSettings(
                **plan.fleet_settings,
                flush_ms=plan.flush_ms,
                role=host.role,
                role_switching=plan.split,
                state_directory=self.environment.state_directory if plan.workers_pause else "",
            ),
            target=EngineTarget(instance=host.instance, url=host.url),
            engine=HostProbe(host, plan.engine.block_size),
            events=KvEventReader(KvEndpoint("", ""), sockets=lambda _endpoint: MemorySockets(host)),
        )
        supervisor.start(service.run(), name="worker")

    @override
    async def shut_down(self, supervisor: Supervisor) -> None:
        pauses = self.environment.plan.workers_pause
        if pauses and supervisor.stopped_in_order and not supervisor.for_good:
            await self.service.pause()
        else:
            await self.service.leave("worker stopped")


class IngressProcess(HttpProcess):
    def __init__(self, environment: Environment, name: str) -> None:
        super().__init__(environment, name)
        self.engines_cut: set[str] = set()
        self.tried: dict[str, list[str]] = {}
        self.connected: dict[str, set[str]] = {}

    @override
    async def serve(self, run: ProcessRun, supervisor: Supervisor) -> None:
        environment = self.environment
        session = Session(
            environment.sites,
            environment.loop,
            environment.chance("http"),
            can_reach=lambda host: host not in self.engines_cut,
            sends=self._sends,
            connects=self._connects,
        )
        shared = {name: value for name, value in environment.plan.fleet_settings.items() if name != "block_tokens"}
        settings = IngressSettings(**shared, **environment.plan.ingress_settings, name=self.link.name)
        async with assembled(
            settings,
            {self.environment.network.pool: self.link.ports},
            clock=self.clock,
            board=run.board,
            supervisor=supervisor,
            engine_session=cast(aiohttp.ClientSession, session),
            chance=environment.chance(f"ids of {self.link.name}"),
            executor=InPlace(),
        ) as apps:
            self.app = apps.api
            await supervisor.until_stopped()
            await self._drain(run, settings)

    async def _drain(self, run: ProcessRun, settings: IngressSettings) -> None:
        run.board.missing(SHUTDOWN_PART, "shutting down")
        await asyncio.sleep(settings.lame_duck_seconds)
        self.app = None
        answering = [task for task in run.exchanges.values() if task is not None]
        if answering:
            _, overdue = await asyncio.wait(answering, timeout=settings.drain_seconds_max)
            for task in overdue:
                task.cancel()
            await asyncio.gather(*overdue, return_exceptions=True)

    @property
    def takes_traffic(self) -> bool:
        return self.app is not None and self.run is not None and self.run.board.ready

    def _was_rebound_from(self, host: str, request: RequestId, tried: list[str]) -> bool:
        """A redispatched request may return to an engine that had not failed it."""
        told = (
            (request, InstanceId(after)) in self.link.rebound for before, after in pairwise(tried) if before == host
        )
        return any(told) or any(
            isinstance(s.event, RequestMigrated)
            and s.event.rebound
            and (s.event.request, s.event.source) == (request, host)
            for s in (*self.environment.network.history, *self.environment.network.lost)
        )

    def _sends(self, host: str, headers: dict[str, str]) -> None:
        """Checks the answer that a dispatch relies on, and that no engine gets a request twice; where none could be
        reached, but for those that it was redispatched from, all are tried again."""
        request = RequestId(headers.get("x-request-id", ""))
        of_here = f"{self.link.name} {request}"
        tried = self.tried.setdefault(of_here, [])
        reached = any(not self._was_rebound_from(other, request, tried) for other in self.connected.get(of_here, ()))
        again = host in tried and reached and not self.environment.plan.split and not request.startswith(PROBES)
        if again and not self._was_rebound_from(host, request, tried):
            self.environment.violation(f"{self.name} sent {request} to {host} again, after {tried}")
        tried.append(host)
        heeded = self.link.stale_answer(request)
        if heeded:
            self.environment.violation(f"{self.name} sent {request} to its engine, and {heeded}")

    def _connects(self, host: str, headers: dict[str, str]) -> None:
        self.connected.setdefault(f"{self.link.name} {headers.get('x-request-id', '')}", set()).add(host)


class EngineProcess(HttpProcess):
    networked = False
    date_may_be_wrong = False

    def __init__(self, environment: Environment, name: str, host: EngineHost) -> None:
        super().__init__(environment, name)
        self.host = host

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        environment = self.environment
        way = Session(
            environment.sites,
            environment.loop,
            environment.chance("transfers"),
            can_reach=lambda _: True,
        )
        engine = RunningEngine(
            environment.loop,
            environment.chance("engines"),
            self.clock,
            environment.plan.engine,
            environment.chain,
            seed=self.runs,
            url=self.host.url,
            to_others=way if environment.plan.split else None,
            adapters=self.host.names.adapters,
            lies=self.host.lies,
            failure_mode=self.host.failure_mode,
        )
        supervisor.start(engine.engine.run(), name="steps")
        self.app = engine.app
        self.host.began(engine)

    @override
    def died(self) -> None:
        super().died()
        self.host.died()

    @override
    def pause(self) -> None:
        super().pause()
        self.host.paused = True

    @override
    def resume(self) -> None:
        super().resume()
        self.host.paused = False

    @override
    def kill(self) -> None:
        super().kill()
        self.host.paused = False


class RecorderProcess(Process):
    def __init__(self, environment: Environment, name: str) -> None:
        super().__init__(environment, name)
        self.archive = MemoryArchive(environment.chance("archive"))

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        recorder = Recorder(
            self.link.ports.log, self.archive, self.clock, run.board, batch_events=200, batch_seconds=WallSeconds(0.05)
        )
        supervisor.start(recorder.collect(), name="collect")
        supervisor.start(recorder.archive(), name="archive")


class RebalancerProcess(Process):
    service: RebalancerService

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        plan = self.environment.plan
        if plan.rebalancer_delay and not self.environment.healed:
            self.link.conditions = LinkConditions(delay=plan.rebalancer_delay)
        fleet = {name: value for name, value in plan.fleet_settings.items() if name != "secret"}
        settings = RebalancerSettings(**fleet, rebind=plan.scheduler.rebind)
        self.service = RebalancerService(
            link=self.link.ports,
            clock=self.clock,
            board=run.board,
            settings=settings,
            policy=chosen_policy(settings),
            name=self.link.name,
        )
        supervisor.start(self.service.run(), name="fold")
        supervisor.start(self.service.rebalance(), name="rebalance")


class ScalerProcess(Process):
    service: ScalerService

    def __init__(self, environment: Environment, name: str, provider: InstanceProvider | None) -> None:
        super().__init__(environment, name)
        self._provider = provider

    @override
    def launch(self, run: ProcessRun, supervisor: Supervisor) -> None:
        settings = ScalerSettings(**self.environment.plan.fleet_settings, **self.environment.plan.scaler_settings)
        self.service = service = ScalerService(
            link=self.link.ports,
            provider=self._provider or chosen_provider(settings),
            policy=scaling_policy(settings.scaling, {}),
            clock=self.clock,
            board=run.board,
            settings=settings,
            name=self.link.name,
        )
        supervisor.start(service.run(), name="fold")
        supervisor.start(service.act(), name="act")
        supervisor.start(service.report(), name="report")

    @override
    async def shut_down(self, supervisor: Supervisor) -> None:
        await self.service.resign()


def engine_host(environment: Environment, number: int) -> EngineHost:
    plan, instance = environment.plan, InstanceId(f"engine-{number}")
    return EngineHost(
        instance,
        plan.roles[number - 1],
        environment.loop,
        environment.chance(f"host {number}"),
        replays=plan.replays[number - 1],
        adapters=plan.adapters[number - 1],
    )
