"""Distinct prompt blocks in use by the requests in flight on each instance, without answers: a load measure."""

from collections.abc import Iterable

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId
from pointsman.state.promises import Promises
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request


class ActiveBlocks(Tracker):
    def __init__(self) -> None:
        self._in_use = Promises()
        self._homes: dict[RequestId, InstanceId] = {}

    def blocks_with(self, keys: list[BlockKey], instances: Iterable[InstanceId]) -> dict[InstanceId, int]:
        shared: dict[InstanceId, int] = {}
        self._in_use.extend_hits(keys, shared)
        return {i: self._in_use.blocks(i) + len(keys) - shared.get(i, 0) for i in instances}

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._release(request)
        self._homes[request.id] = request.instance
        self._in_use.promise(request.instance, request.keys)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._release(request)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        self._release(request)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._in_use.drop(instance)
        self._homes = {request: home for request, home in self._homes.items() if home != instance}

    def _release(self, request: Request) -> None:
        home = self._homes.pop(request.id, None)
        if home is not None:
            self._in_use.release(home, request.keys)
