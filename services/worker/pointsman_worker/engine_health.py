"""Health of one engine among many: its trouble degrades the worker and does not make it unready."""

from typing_extensions import override

from pointsman.primitives import InstanceId
from pointsman.runtime.health import HealthBoard


class EngineHealth(HealthBoard):
    """Parts of `board` that are named after the instance; `close` takes them away."""

    def __init__(self, board: HealthBoard, instance: InstanceId) -> None:
        super().__init__(pool=board.pool, of=instance)
        self._board = board

    @override
    def missing(self, part: str, reason: str) -> None:
        self.degraded(part, reason)

    @override
    def degraded(self, part: str, reason: str) -> None:
        self._parts.setdefault(part)
        self._board.degraded(self._named(part), reason)

    @override
    def restored(self, part: str) -> None:
        if part in self._parts:
            self._board.restored(self._named(part))

    def close(self) -> None:
        for part in self.parts:
            self._board.forget(self._named(part))
