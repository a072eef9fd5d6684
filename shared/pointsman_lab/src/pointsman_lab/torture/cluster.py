"""One simulated world: a loop, a network, the processes of a fleet, and an account of what was done to them."""

from random import Random
from tempfile import TemporaryDirectory

from pointsman.contracts.block_keys import KeyChain
from pointsman.ports import Clock
from pointsman.primitives import InstanceId, PoolName, Seconds, Sequence
from pointsman_lab.torture.clients import Traffic
from pointsman_lab.torture.engines import MODEL, EngineHost
from pointsman_lab.torture.ghosts import GhostWatch
from pointsman_lab.torture.http import Site
from pointsman_lab.torture.loop import KillableTask, VirtualLoop
from pointsman_lab.torture.network import Link, Network
from pointsman_lab.torture.operator import Operator
from pointsman_lab.torture.plan import POOL, POOL_BLOCK_TOKENS, SECRET, Plan
from pointsman_lab.torture.processes import (
    CheckpointerProcess,
    EngineProcess,
    IngressProcess,
    Process,
    RebalancerProcess,
    RecorderProcess,
    ScalerProcess,
    SchedulerProcess,
    WorkerProcess,
    engine_host,
)
from pointsman_lab.torture.provider import SimulatedProvider


class Cluster:
    """Everything of one run. Chance is drawn from streams of their own, so that one more message somewhere does
    not change which process is killed when."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.loop = loop
        self._chances: dict[str, Random] = {}
        self.network = Network(PoolName(POOL), loop, self.chance("network"))
        self.chain = KeyChain(secret=SECRET.encode(), model=MODEL, block_tokens=POOL_BLOCK_TOKENS)
        self.trace: list[tuple[Seconds, str]] = []
        self.violations: list[str] = []
        self.healed = False
        """Whether all faults have ended."""
        self.lapses: set[tuple[str, Sequence]] = set()
        """By the name of its link: log entries that a scheduler read while it did not lead, or could not be sure of its lease."""
        self.network.reads = self._read
        self._directory = TemporaryDirectory(prefix="torture-")
        self.state_directory = self._directory.name
        """Where workers leave what the next one goes on from."""
        self.lives: list[KillableTask] = []
        """Of all processes, the dead ones too."""
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
        self.provider = SimulatedProvider(self, self.chance("provider")) if plan.spare else None
        self.scalers = [ScalerProcess(self, f"scaler-{n}", self.provider) for n in range(1, plan.scalers + 1)]
        self.sites: dict[str, Site] = {engine.name: engine for engine in self.engines}
        self.operator = Operator(self)
        self.ghosts = GhostWatch(self)
        self.traffic = Traffic(plan, self.chance("traffic"))

    @property
    def services(self) -> list[Process]:
        """Every process with a link, that is all but the engines."""
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

    def chance(self, name: str) -> Random:
        """The stream of chance of that name."""
        found = self._chances.get(name)
        if found is None:
            found = self._chances[name] = Random(f"{name} {self.plan.seed}")
        return found

    def link(self, clock: Clock, name: str) -> Link:
        return self.network.link(clock, name=name, window_max=self.plan.window_max, on_failure=self._handler_failed)

    def note(self, what: str) -> None:
        """Something was done to the fleet."""
        self.trace.append((self.loop.time(), what))

    def violation(self, what: str) -> None:
        """Something happened that must not."""
        self.violations.append(what)
        self.note(f"VIOLATION {what}")

    def forget(self) -> None:
        """The run is over: take the world apart. FastAPI's caches keep a part of every ingress alive, and would keep
        everything that hangs on it."""
        self._directory.cleanup()
        for part in (*self.network.links, *self.lives, *self.processes, self.network, self):
            vars(part).clear()

    def _read(self, link: Link, sequence: Sequence) -> None:
        for scheduler in self.schedulers:
            own = scheduler.life is not None and scheduler.life.link is link
            if own and scheduler.service.leading is None:
                self.lapses.add((link.name, sequence))

    def _handler_failed(self, subject: str, error: Exception) -> None:
        self.violation(f"a handler of {subject} raised {error!r}")
