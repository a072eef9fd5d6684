"""Shared by the processes of one run: loop, network, random streams, trace and violations."""

from random import Random
from tempfile import TemporaryDirectory

from pointsman.contracts.block_keys import KeyChain
from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, PoolName
from pointsman_lab.torture.engines import MODEL
from pointsman_lab.torture.http import Site
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.loop import KillableTask, VirtualLoop
from pointsman_lab.torture.network import Network
from pointsman_lab.torture.older_release import make_older
from pointsman_lab.torture.plan import POOL, POOL_BLOCK_TOKENS, SECRET, Plan
from pointsman_lab.torture.simulated_ports import open_link


class Environment:
    """Each purpose has its own random stream, so that one more message does not change which process is killed when."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.loop = loop
        self._chances: dict[str, Random] = {}
        self.network = Network(PoolName(POOL), loop, self.chance("network"))
        self.chain = KeyChain(secret=SECRET.encode(), model=MODEL, block_tokens=POOL_BLOCK_TOKENS)
        self.trace: list[tuple[EngineSeconds, str]] = []
        self.violations: list[str] = []
        self.healed = False
        self.sites: dict[str, Site] = {}
        self.runs: list[KillableTask] = []
        self._directory = TemporaryDirectory(prefix="torture-")
        self.state_directory = self._directory.name

    def chance(self, name: str) -> Random:
        found = self._chances.get(name)
        if found is None:
            found = self._chances[name] = Random(f"{name} {self.plan.seed}")
        return found

    def link(self, clock: Clock, name: str, *, older: bool = False) -> Link:
        link = open_link(
            self.network,
            clock,
            name=name,
            window_max=self.plan.window_max,
            on_failure=lambda subject, error: self.violation(f"a handler of {subject} raised {error!r}"),
        )
        if older:
            self.note(f"{name} is of the release before")
            make_older(link)
        return link

    def note(self, what: str) -> None:
        self.trace.append((self.loop.time(), what))

    def violation(self, what: str) -> None:
        self.violations.append(what)
        self.note(f"VIOLATION {what}")

    def forget(self) -> None:
        """Breaks reference cycles: FastAPI's caches keep a part of every ingress alive."""
        self._directory.cleanup()
        for part in (*self.network.links, *self.runs, self.network, self):
            vars(part).clear()
