"""The provider for pools whose engines are run by hand: it logs what an operator should do."""

import structlog
from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance
from pointsman.primitives import InstanceId

log = structlog.get_logger()


class StaticProvider(InstanceProvider):
    def __init__(self) -> None:
        self._told: str = ""

    @property
    @override
    def name(self) -> str:
        return "static"

    @override
    async def running(self) -> list[ProvidedInstance]:
        return []

    @override
    async def grow(self, total: int) -> None:
        self._tell(f"start {total} more instances")

    @override
    async def stop(self, instance: InstanceId) -> None:
        self._tell(f"stop {instance}")

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        return []

    def _tell(self, wish: str) -> None:
        """Once for each change: the scaler asks every moment."""
        if wish != self._told:
            self._told = wish
            log.warning("manual_scaling_required", please=wish)
