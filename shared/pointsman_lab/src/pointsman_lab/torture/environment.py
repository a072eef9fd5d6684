"""What the processes of one run share: a loop, a network, chance, and a record of what was done to them."""

from random import Random
from tempfile import TemporaryDirectory

from pointsman.contracts.block_keys import KeyChain
from pointsman.ports import Clock
from pointsman.primitives import PoolName, Seconds
from pointsman_lab.torture.engines import MODEL
from pointsman_lab.torture.http import Site
from pointsman_lab.torture.link import Link
from pointsman_lab.torture.loop import KillableTask, VirtualLoop
from pointsman_lab.torture.network import Network
from pointsman_lab.torture.plan import POOL, POOL_BLOCK_TOKENS, SECRET, Plan
from pointsman_lab.torture.simulated_ports import open_link


class Environment:
    """Each use of chance has a stream of its own, so that one more message does not change which process is killed when."""

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
        self.sites: dict[str, Site] = {}
        """HTTP servers by host name."""
        self.lives: list[KillableTask] = []
        """Of all processes, the dead ones included."""
        self._directory = TemporaryDirectory(prefix="torture-")
        self.state_directory = self._directory.name
        """Where a worker that is restarted leaves its state."""

    def chance(self, name: str) -> Random:
        """The stream of chance of that name."""
        found = self._chances.get(name)
        if found is None:
            found = self._chances[name] = Random(f"{name} {self.plan.seed}")
        return found

    def link(self, clock: Clock, name: str) -> Link:
        return open_link(
            self.network, clock, name=name, window_max=self.plan.window_max, on_failure=self._handler_failed
        )

    def note(self, what: str) -> None:
        """Something was done to the fleet."""
        self.trace.append((self.loop.time(), what))

    def violation(self, what: str) -> None:
        """Something happened that must not."""
        self.violations.append(what)
        self.note(f"VIOLATION {what}")

    def forget(self) -> None:
        """Take the run apart: FastAPI's caches keep a part of every ingress alive, and all that it refers to."""
        self._directory.cleanup()
        for part in (*self.network.links, *self.lives, self.network, self):
            vars(part).clear()

    def _handler_failed(self, subject: str, error: Exception) -> None:
        self.violation(f"a handler of {subject} raised {error!r}")
