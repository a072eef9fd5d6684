"""Provider for engines that people or an autoscaler run: it does nothing. The scaler says what is to be done."""

from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance
from pointsman.primitives import InstanceId


class StaticProvider(InstanceProvider):
    @property
    @override
    def name(self) -> str:
        return "static"

    @property
    @override
    def manages(self) -> bool:
        return False

    @override
    async def running(self) -> list[ProvidedInstance]:
        return []

    @override
    async def grow(self, total: int) -> None:
        pass

    @override
    async def stop(self, instance: InstanceId) -> None:
        pass

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        return []
