"""Prefill seconds and cached share of the prompts placed on each instance over a time window. Finished work stays in
the window, which evens out load in the long run (Preble)."""

from collections import OrderedDict
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage


@dataclass(frozen=True, slots=True)
class _Placement:
    at: EngineSeconds
    instance: InstanceId
    prefill_seconds: EngineSeconds
    prompt_tokens: Tokens
    cached_tokens: Tokens


@dataclass(slots=True)
class _Load:
    placements: int = 0
    seconds: EngineSeconds = 0.0
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0


class WindowedLoad(Tracker):
    def __init__(self, window_s: EngineSeconds) -> None:
        self._window_s = window_s
        self._placements: OrderedDict[RequestId, _Placement] = OrderedDict()
        self._loads: dict[InstanceId, _Load] = {}

    def seconds(self, instance: InstanceId) -> EngineSeconds:
        load = self._loads.get(instance)
        return load.seconds if load else 0.0

    def hit_share(self, instance: InstanceId) -> float:
        load = self._loads.get(instance)
        return load.cached_tokens / load.prompt_tokens if load and load.prompt_tokens > 0 else 0.0

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self._expire(at)

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._expire(at)
        self._take_back(request.id)
        cached = request.prompt_tokens - request.uncached_tokens
        placement = _Placement(at, request.instance, request.prefill_seconds, request.prompt_tokens, cached)
        self._placements[request.id] = placement
        load = self._loads.setdefault(request.instance, _Load())
        load.placements += 1
        load.seconds += placement.prefill_seconds
        load.prompt_tokens += placement.prompt_tokens
        load.cached_tokens += placement.cached_tokens

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._take_back(request.id)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if request.stage is Stage.PENDING:
            self._take_back(request.id)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        for request in [r for r, placement in self._placements.items() if placement.instance == instance]:
            self._take_back(request)

    def _expire(self, now: EngineSeconds) -> None:
        placements = self._placements
        while placements:
            request, oldest = next(iter(placements.items()))
            if oldest.at > now - self._window_s:
                return
            self._take_back(request)

    def _take_back(self, request: RequestId) -> None:
        placement = self._placements.pop(request, None)
        if placement is None:
            return
        load = self._loads[placement.instance]
        load.placements -= 1
        if load.placements == 0:
            # Exactly 0 for an empty window, whatever the rounding.
            del self._loads[placement.instance]
            return
        load.seconds = max(0.0, load.seconds - placement.prefill_seconds)
        load.prompt_tokens -= placement.prompt_tokens
        load.cached_tokens -= placement.cached_tokens
