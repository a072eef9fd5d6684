"""The lists of engines that a source gives while a test changes what is behind it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pointsman.ports import EngineDiscovery, EngineTarget
from tests.support.waiting import eventually


class Discovered:
    def __init__(self, discovery: EngineDiscovery) -> None:
        self.discovery = discovery
        self.lists: list[list[EngineTarget]] = []

    async def read(self) -> None:
        async for targets in self.discovery.targets():
            self.lists.append(targets)

    def names(self) -> list[str]:
        return [target.instance for target in self.lists[-1]] if self.lists else ["nothing read"]

    def __getitem__(self, name: str) -> EngineTarget:
        return next(target for target in self.lists[-1] if target.instance == name)

    async def until(self, *names: str) -> None:
        await eventually(lambda: self.names() == sorted(names), what=f"{sorted(names)}")


@asynccontextmanager
async def discovered(discovery: EngineDiscovery) -> AsyncGenerator[Discovered, None]:
    found = Discovered(discovery)
    task = asyncio.create_task(found.read())
    try:
        yield found
    finally:
        ended_early = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not ended_early, task
