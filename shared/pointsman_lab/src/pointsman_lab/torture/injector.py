"""Shared by all faults: randomness, delays, and a kill between any two steps."""

from collections.abc import Callable

from pointsman.primitives import EngineSeconds
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.processes import Process

STEPS_BEFORE_KILL_MAX = 12
"""A kill is delayed by up to so many turns of the loop."""


class Injector:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.chance = cluster.chance("faults")

    @property
    def over(self) -> bool:
        return self.cluster.healed

    def kill_process(self, process: Process, down_seconds: EngineSeconds) -> None:
        if process.run is None:
            return
        self._kill_after(process, self.chance.randrange(STEPS_BEFORE_KILL_MAX), down_seconds)

    def _kill_after(self, process: Process, steps: int, down_seconds: EngineSeconds) -> None:
        if steps and not self.over:
            self.cluster.loop.call_soon(self._kill_after, process, steps - 1, down_seconds)
            return
        if process.run is None:
            return
        self.cluster.note(f"SIGKILL {process.name}, back in {down_seconds:.2f} s")
        process.kill()
        self.later(down_seconds, self.start, process)

    def start(self, process: Process) -> None:
        if process.run is None and process.wanted:
            self.cluster.note(f"start {process.name}")
            process.start()

    def later(self, seconds: EngineSeconds, act: Callable[..., None], *arguments: object) -> None:
        self.cluster.loop.outside(seconds, act, *arguments)

    def seconds(self, most: EngineSeconds) -> EngineSeconds:
        return min(most, 0.2 + self.chance.expovariate(3.0 / most))
