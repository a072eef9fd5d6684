"""Decode speed of each instance by its number of decoding requests; the basis of TPOT predictions. Each finished answer
is one point: seconds per token over the mean number of requests decoding at its first and last token. Least squares
with weights that halve every HALF_LIFE_SECONDS, slope and offset at least 0; no prediction without recent points. Bias:
contexts and prefills count only as far as they correlate with the number of requests."""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

HALF_LIFE_SECONDS = 30.0
EVIDENCE_MIN = 8.0
"""Faded points needed for a prediction."""


@dataclass(slots=True)
class DecodeFit:
    weight: float = 0.0
    count: float = 0.0
    seconds: float = 0.0
    count_squared: float = 0.0
    count_seconds: float = 0.0
    at: EngineSeconds = 0.0

    def evidence(self, now: EngineSeconds) -> float:
        return self.weight * _fade(now - self.at)

    def learn(self, decoding: float, seconds_per_token: EngineSeconds, at: EngineSeconds) -> None:
        fade = _fade(at - self.at)
        self.weight = self.weight * fade + 1.0
        self.count = self.count * fade + decoding
        self.seconds = self.seconds * fade + seconds_per_token
        self.count_squared = self.count_squared * fade + decoding * decoding
        self.count_seconds = self.count_seconds * fade + decoding * seconds_per_token
        self.at = max(at, self.at)

    def seconds_per_token(self, decoding: int) -> EngineSeconds:
        mean_count, mean_seconds = self.count / self.weight, self.seconds / self.weight
        variance = self.count_squared / self.weight - mean_count * mean_count
        covariance = self.count_seconds / self.weight - mean_count * mean_seconds
        slope = max(0.0, covariance / variance) if variance > 1e-6 else 0.0
        slope = min(slope, mean_seconds / mean_count)
        return mean_seconds + slope * (decoding - mean_count)


class DecodeLoad(Tracker):
    def __init__(self) -> None:
        self._fits: dict[InstanceId, DecodeFit] = {}
        self._decoding: dict[InstanceId, dict[RequestId, int]] = {}

    def predicted_tpot(
        self, instance: InstanceId, now: EngineSeconds, *, others: int | None = None
    ) -> EngineSeconds | None:
        """Seconds per token with one more request; None without evidence. `others`: requests decoding; default: those
        with a first token."""
        fit = self._fits.get(instance)
        if fit is None or fit.evidence(now) < EVIDENCE_MIN:
            return None
        return fit.seconds_per_token((len(self._decoding.get(instance, ())) if others is None else others) + 1)

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        decoding = self._decoding.setdefault(request.instance, {})
        decoding[request.id] = len(decoding) + 1

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.stage is Stage.DECODING:
            self._decoding.get(request.instance, {}).pop(request.id, None)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        decoding = self._decoding.get(request.instance, {})
        last = len(decoding)
        first = decoding.pop(request.id, None)
        if first is not None and finished and finished.tpot > 0 and finished.completion_tokens > 1:
            fit = self._fits.setdefault(request.instance, DecodeFit())
            fit.learn((first + last) / 2, finished.tpot, at)

    @override
    def joined(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._fits.pop(instance, None)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._fits.pop(instance, None)
        self._decoding.pop(instance, None)


def _fade(seconds: EngineSeconds) -> float:
    return float(0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS))
