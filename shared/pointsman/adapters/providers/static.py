"""Provider for engines that people or an autoscaler run. The scaler only tells them what is to be
done: this provider starts and stops nothing."""

from typing_extensions import override

from pointsman.ports import InstanceProvider, ProvidedInstance
from pointsman.primitives import InstanceId

NOT_HERE = "the static provider starts and stops nothing"


class StaticProvider(InstanceProvider):
    name = "static"

    @property
    @override
    def manages(self) -> bool:
        return False

    @override
    async def running(self) -> list[ProvidedInstance]:
        return []

    @override
    async def grow(self, total: int) -> None:
        raise AssertionError(NOT_HERE)

    @override
    async def stop(self, instance: InstanceId) -> None:
        raise AssertionError(NOT_HERE)

    @override
    def stoppable(self, running: list[InstanceId]) -> list[InstanceId]:
        return []
