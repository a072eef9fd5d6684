"""Decode speed of each instance by its number of decoding answers; the basis of TPOT predictions. Each finished request
is one point: seconds per token of an answer over the mean number of answers decoding at its first and last token. Least
squares with weights that halve every HALF_LIFE_SECONDS, slope and offset at least 0; no prediction without recent points.
Bias: contexts and prefills count only as far as they correlate with the number of answers; of several answers to a request
(`n`) the longest is taken to have their mean length."""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished, tpot_of_each
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.state.fold_versions import DECODE_ANSWERS
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


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request. `beside`: answers decoding at its first token, its own included."""

    answers: int
    beside: int


class DecodeLoad(Tracker):
    def __init__(self) -> None:
        self._fits: dict[InstanceId, DecodeFit] = {}
        self._decoding: dict[InstanceId, dict[RequestId, Decoding]] = {}

    def predicted_tpot(
        self, instance: InstanceId, request: Request, now: EngineSeconds, *, others: int | None = None
    ) -> EngineSeconds | None:
        """Seconds per token with this request in addition; None without evidence. `others`: answers decoding; default:
        those of requests with a first token."""
        fit = self._fits.get(instance)
        if fit is None or fit.evidence(now) < EVIDENCE_MIN:
            return None
        beside = self._answers_at(instance) if others is None else others
        return fit.seconds_per_token(beside + self.answers_of(request))

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        answers = self.answers_of(request)
        beside = self._answers_at(request.instance) + answers
        self._decoding.setdefault(request.instance, {})[request.id] = Decoding(answers, beside)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.stage is Stage.DECODING:
            self._decoding.get(request.instance, {}).pop(request.id, None)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        last = self._answers_at(request.instance)
        known = self._decoding.get(request.instance, {}).pop(request.id, None)
        if known is None or finished is None:
            return
        tpot = _seconds_per_token(finished, known.answers)
        if tpot > 0:
            fit = self._fits.setdefault(request.instance, DecodeFit())
            fit.learn((known.beside + last) / 2, tpot, at)

    @override
    def joined(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._fits.pop(instance, None)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._fits.pop(instance, None)
        self._decoding.pop(instance, None)

    def answers_of(self, request: Request) -> int:
        """That an instance generates at once for it, by the version of the log."""
        return request.answers if self.fold_version >= DECODE_ANSWERS else 1

    def _answers_at(self, instance: InstanceId) -> int:
        return sum(known.answers for known in self._decoding.get(instance, {}).values())


def _seconds_per_token(finished: RequestFinished, answers: int) -> EngineSeconds:
    """0: unknown."""
    tokens = finished.completion_tokens
    return 0.0 if tokens <= answers else tpot_of_each(finished.tpot, tokens, answers)


def _fade(seconds: EngineSeconds) -> float:
    return float(0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS))
