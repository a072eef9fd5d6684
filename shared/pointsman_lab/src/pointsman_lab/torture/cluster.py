"""Builds the processes of one run."""

from typing_extensions import override

from pointsman.primitives import InstanceId, Sequence
from pointsman_lab.torture.clients import Traffic
from pointsman_lab.torture.engine_host import EngineHost
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.loop import VirtualLoop
from pointsman_lab.torture.operator import Operator
from pointsman_lab.torture.plan import Plan
from pointsman_lab.torture.processes import Process
from pointsman_lab.torture.provider import SimulatedProvider
from pointsman_lab.torture.services import (
    CheckpointerProcess,
    EngineProcess,
    IngressProcess,
    RebalancerProcess,
    RecorderProcess,
    ScalerProcess,
    SchedulerProcess,
    WorkerProcess,
    engine_host,
)


class Cluster(Environment):
    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        super().__init__(plan, loop)
        self.lapses: set[tuple[str, Sequence]] = set()
        self.network.reads = self._read
        self.hosts: dict[InstanceId, EngineHost] = {}
        self.engines: list[EngineProcess] = []
        self.workers: list[WorkerProcess] = []
        for number in range(1, plan.hosts + 1):
            host = engine_host(self, number)
            self.hosts[host.instance] = host
            self.engines.append(EngineProcess(self, host.instance, host))
            self.workers.append(WorkerProcess(self, f"worker-{number}", host))
            self.engines[-1].wanted = self.workers[-1].wanted = number <= plan.engines
        self.schedulers = [SchedulerProcess(self, f"scheduler-{n}") for n in range(1, plan.schedulers + 1)]
        self.ingresses = [IngressProcess(self, f"ingress-{n}") for n in range(1, plan.ingresses + 1)]
        self.checkpointer = CheckpointerProcess(self, "checkpointer")
        self.recorder = RecorderProcess(self, "recorder")
        self.rebalancer = RebalancerProcess(self, "rebalancer")
        self.provider = (
            SimulatedProvider(self, self.chance("provider"), list(zip(self.engines, self.workers, strict=True)))
            if plan.spare
            else None
        )
        self.scalers = [ScalerProcess(self, f"scaler-{n}", self.provider) for n in range(1, plan.scalers + 1)]
        self.sites.update((engine.name, engine) for engine in self.engines)
        self.operator = Operator(self)
        self.traffic = Traffic(plan, self.chance("traffic"))

    @property
    def services(self) -> list[Process]:
        return [
            *self.schedulers,
            *self.ingresses,
            *self.workers,
            self.checkpointer,
            self.recorder,
            self.rebalancer,
            *self.scalers,
        ]

    @property
    def processes(self) -> list[Process]:
        return [*self.engines, *self.services]

    @override
    def forget(self) -> None:
        for process in self.processes:
            vars(process).clear()
        super().forget()

    def _read(self, link: str, sequence: Sequence) -> None:
        for scheduler in self.schedulers:
            own = scheduler.run is not None and scheduler.link.name == link
            if own and scheduler.service.leading is None:
                self.lapses.add((link, sequence))
