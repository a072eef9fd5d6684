"""Engines that settings name: a list that never changes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from typing_extensions import override

from pointsman.ports import EngineDiscovery, EngineTarget


class ListedEngines(EngineDiscovery):
    def __init__(self, targets: Sequence[EngineTarget]) -> None:
        self.name = "list"
        self.problem = ""
        self._targets = list(targets)

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        yield list(self._targets)
        await asyncio.Event().wait()
