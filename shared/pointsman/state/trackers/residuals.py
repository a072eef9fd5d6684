"""Residuals of latency predictions (LBGR, Wu et al., ICLR'26, Algorithm 2), learned for each instance by recursive least
squares with forgetting: those of streamed first tokens, or those of whole answers, as published."""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens, plain_sum
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decayed_load import DecayedLoad
from pointsman.state.workload import Request

PRIOR_VARIANCE = 1.0

Features = tuple[float, ...]


class LeastSquares:
    def __init__(self, size: int, forgetting: float) -> None:
        """`forgetting`: weight of earlier observations at each new one."""
        self._forgetting = forgetting
        self._weights = [0.0] * size
        self._covariance = [[PRIOR_VARIANCE * (i == j) for j in range(size)] for i in range(size)]
        self._variance_max = PRIOR_VARIANCE * size

    def predict(self, features: Features) -> float:
        return plain_sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))

    def learn(self, features: Features, observed: float) -> None:
        spread = [plain_sum(c * feature for c, feature in zip(row, features, strict=True)) for row in self._covariance]
        scale = self._forgetting + plain_sum(s * feature for s, feature in zip(spread, features, strict=True))
        error = observed - self.predict(features)
        self._weights = [w + s / scale * error for w, s in zip(self._weights, spread, strict=True)]
        self._covariance = [
            [c - si * sj / scale for c, sj in zip(row, spread, strict=True)]
            for row, si in zip(self._covariance, spread, strict=True)
        ]
        self._forget()

    def _forget(self) -> None:
        """Inflate the covariance, bounded by the prior."""
        variance = plain_sum(self._covariance[i][i] for i in range(len(self._weights)))
        if variance <= self._forgetting * self._variance_max:
            self._covariance = [[c / self._forgetting for c in row] for row in self._covariance]


@dataclass(frozen=True, slots=True)
class _Prediction:
    instance: InstanceId
    at: EngineSeconds
    features: Features
    seconds: EngineSeconds


class Residuals(Tracker):
    """Must be updated before `load`: a request's own work is not in its features. `as_published`: the observed
    latency is end to end, and the features are bias, miss, hit and load; else it is that of the first token, and the
    requests under way are a feature too."""

    def __init__(self, load: DecayedLoad, forgetting: float, *, as_published: bool = False) -> None:
        self._load = load
        self._forgetting = forgetting
        self._as_published = as_published
        self._models: dict[InstanceId, LeastSquares] = {}
        self._predictions: dict[RequestId, _Prediction] = {}

    def seconds(self, instance: InstanceId, *, uncached: Tokens, cached: Tokens, now: EngineSeconds) -> EngineSeconds:
        """Expected residual of such a prompt; may be negative."""
        model = self._models.get(instance)
        return model.predict(self._features(instance, uncached, cached, now)) if model else 0.0

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        instance, uncached = request.instance, request.uncached_tokens
        self._predictions[request.id] = _Prediction(
            instance=instance,
            at=at,
            features=self._features(instance, uncached, request.prompt_tokens - uncached, at),
            seconds=self._load.seconds(instance, at) + self._load.prefill_seconds(request),
        )

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._predictions.pop(request.id, None)

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        if not self._as_published:
            prediction = self._predictions.pop(request.id, None)
            if request.streaming:
                self._learn(prediction, at)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        prediction = self._predictions.pop(request.id, None)
        if self._as_published and finished is not None:
            self._learn(prediction, at)

    @override
    def left(self, instance: InstanceId, at: EngineSeconds) -> None:
        self._models.pop(instance, None)
        self._predictions = {r: p for r, p in self._predictions.items() if p.instance != instance}

    def _learn(self, prediction: _Prediction | None, at: EngineSeconds) -> None:
        if prediction is None:
            return
        model = self._models.get(prediction.instance)
        if model is None:
            model = self._models[prediction.instance] = LeastSquares(len(prediction.features), self._forgetting)
        model.learn(prediction.features, at - prediction.at - prediction.seconds)

    def _features(self, instance: InstanceId, uncached: Tokens, cached: Tokens, now: EngineSeconds) -> Features:
        """Tokens in thousands, requests in tens."""
        load = self._load
        published = (1.0, uncached / 1000, cached / 1000, load.seconds(instance, now))
        return published if self._as_published else (*published, load.requests(instance) / 10)
