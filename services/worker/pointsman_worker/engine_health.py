"""Health and metrics of one engine among many: its trouble degrades the worker and does not make it unready."""

from typing_extensions import override

from pointsman.primitives import InstanceId
from pointsman.runtime import telemetry
from pointsman.runtime.health import HealthBoard

OWN_SERIES = (
    telemetry.ENGINE_EVENTS,
    telemetry.ENGINE_EVENTS_UNDECODABLE,
    telemetry.ENGINE_EVENT_GAPS,
    telemetry.ENGINE_STORES_DROPPED,
    telemetry.ENGINE_BLOCKS_EXPIRED,
)


class EngineHealth(HealthBoard):
    """Parts of `board` that are named after the instance. `close` takes them away, with the instance's metrics."""

    def __init__(self, board: HealthBoard, instance: InstanceId) -> None:
        super().__init__(of=instance)
        self._board = board
        self._instance = instance

    @override
    def missing(self, part: str, reason: str) -> None:
        self.degraded(part, reason)

    @override
    def degraded(self, part: str, reason: str) -> None:
        super().degraded(part, reason)
        self._board.degraded(self._named(part), reason)

    @override
    def restored(self, part: str) -> None:
        super().restored(part)
        self._board.restored(self._named(part))

    def close(self) -> None:
        for name in self.parts:
            self._board.forget(name)
        for metric in OWN_SERIES:
            metric.remove_by_labels({"instance": self._instance})
