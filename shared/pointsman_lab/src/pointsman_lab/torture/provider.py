"""The instance provider of a simulated scaler: empty hosts, each with a worker. Calls can fail before or after their
effect."""

import asyncio
from random import Random

from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance, ProviderError
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman_lab.torture.environment import Environment
from pointsman_lab.torture.services import EngineProcess, WorkerProcess

ANSWER_SECONDS: EngineSeconds = 0.02
GOODBYE_SECONDS: EngineSeconds = 2.0


class SimulatedProvider(InstanceProvider):
    name = "simulated"

    def __init__(
        self, environment: Environment, chance: Random, places: list[tuple[EngineProcess, WorkerProcess]]
    ) -> None:
        self._environment = environment
        self._chance = chance
        self._places = places
        self._ending: dict[InstanceId, None] = {}
        self._since: dict[InstanceId, EngineSeconds] = {}
        self.failing = 0.0

    @override
    async def running(self) -> list[ProvidedInstance]:
        fails = await self._called()
        now = self._environment.loop.time()
        found = [ProvidedInstance(e.host.instance, now - self._since.get(e.host.instance, 0.0)) for e in self._wanted]
        self._fail(fails)
        return found

    @override
    async def grow(self, total: int) -> None:
        fails = await self._called()
        missing = total - len(self._wanted)
        empty = [pair for pair in self._places if not pair[0].wanted]
        for engine, worker in empty[: max(0, missing)]:
            self._environment.note(f"the provider starts {engine.name}")
            self._since[engine.host.instance] = self._environment.loop.time()
            for process in (engine, worker):
                process.wanted = True
                process.start()
        self._fail(fails)

    @override
    async def stop(self, instance: InstanceId) -> None:
        fails = await self._called()
        engine, worker = next(pair for pair in self._places if pair[0].host.instance == instance)
        if engine.wanted and instance not in self._ending:
            self._environment.note(f"the provider stops {instance}")
            self._ending[instance] = None
            worker.stop(for_good=True)
            self._environment.loop.outside(GOODBYE_SECONDS, self._end, engine, worker)
        self._fail(fails)

    def _end(self, engine: EngineProcess, worker: WorkerProcess) -> None:
        for process in (worker, engine):
            process.wanted = False
            process.kill()
        self._ending.pop(engine.host.instance, None)

    @property
    def _wanted(self) -> list[EngineProcess]:
        return [engine for engine, _ in self._places if engine.wanted]

    async def _called(self) -> float:
        """0: the call succeeds; below a half: it fails before its effect, else after."""
        await asyncio.sleep(self._chance.expovariate(1 / ANSWER_SECONDS))
        fails = self._chance.random() if self._chance.random() < self.failing else 0.0
        if fails < 0.5:
            self._fail(fails)
        return fails

    def _fail(self, fails: float) -> None:
        if fails:
            raise ProviderError("the provider does not answer")
