"""Provider for engines run by hand: it only logs what an operator should do."""

import structlog
from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance
from pointsman.primitives import InstanceId

log = structlog.get_logger()


class StaticProvider(InstanceProvider):
    def __init__(self) -> None:
        self._logged: str = ""

    @property
    @override
    def name(self) -> str:
        return "static"

    @override
    async def running(self) -> list[ProvidedInstance]:
        return []

    @override
    async def grow(self, total: int) -> None:
        self._advise(f"start {total} more instances")

    @override
    async def stop(self, instance: InstanceId) -> None:
        self._advise(f"stop {instance}")

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        return []

    def _advise(self, advice: str) -> None:
        """Logs a change only, since the scaler calls at every tick."""
        if advice != self._logged:
            self._logged = advice
            log.warning("manual_scaling_required", please=advice)
