"""Prefill work placed on each instance, fading over time. The rest of a request's work is subtracted at its end."""

from dataclasses import dataclass
from math import exp

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request

MISS_SECONDS_PER_TOKEN: EngineSeconds = 0.001
"""alpha_miss of LBGR; cached tokens cost nothing (alpha_hit is 0)."""


@dataclass(frozen=True, slots=True)
class _Share:
    instance: InstanceId
    seconds: EngineSeconds
    at: EngineSeconds


@dataclass(slots=True)
class _Load:
    requests: int = 0
    seconds: EngineSeconds = 0.0
    at: EngineSeconds = 0.0


class DecayedLoad(Tracker):
    """Seconds of prefill, times `1/e` every `decay_s` seconds."""

    def __init__(self, decay_s: EngineSeconds, *, as_published: bool = False) -> None:
        """`as_published`: prefill by MISS_SECONDS_PER_TOKEN, else by the engine's cost model."""
        self._decay_s = decay_s
        self._as_published = as_published
        self._loads: dict[InstanceId, _Load] = {}
        self._shares: dict[RequestId, _Share] = {}

    def prefill_seconds(self, request: Request) -> EngineSeconds:
        return MISS_SECONDS_PER_TOKEN * request.uncached_tokens if self._as_published else request.prefill_seconds

    def seconds(self, instance: InstanceId, now: EngineSeconds) -> EngineSeconds:
        load = self._loads.get(instance)
        return self._faded(load.seconds, now - load.at) if load else 0.0

    def requests(self, instance: InstanceId) -> int:
        load = self._loads.get(instance)
        return load.requests if load else 0

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._release(request.id, at)
        load = self._loads.setdefault(request.instance, _Load(at=at))
        self._fade(load, at)
        load.requests += 1
        seconds = self.prefill_seconds(request)
        load.seconds += seconds
        self._shares[request.id] = _Share(request.instance, seconds, load.at)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._release(request.id, at)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        self._release(request.id, at)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._loads.pop(instance, None)
        self._shares = {request: share for request, share in self._shares.items() if share.instance != instance}

    def _release(self, request: RequestId, at: EngineSeconds) -> None:
        share = self._shares.pop(request, None)
        if share is None:
            return
        load = self._loads[share.instance]
        self._fade(load, at)
        load.requests -= 1
        load.seconds = max(0.0, load.seconds - self._faded(share.seconds, load.at - share.at))
        if load.requests == 0:
            # Exactly 0 without requests, whatever the rounding.
            del self._loads[share.instance]

    def _fade(self, load: _Load, now: EngineSeconds) -> None:
        if now > load.at:
            load.seconds = self._faded(load.seconds, now - load.at)
            load.at = now

    def _faded(self, seconds: EngineSeconds, elapsed: EngineSeconds) -> EngineSeconds:
        return seconds * exp(-max(0.0, elapsed) / self._decay_s)
