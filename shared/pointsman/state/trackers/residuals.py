"""What predictions of the first token leave out, learned for each instance from how late it really came.

A linear model over what was known at placement, fitted by recursive least squares with forgetting: each first token
moves the weights a little, in constant time, towards the residual that it showed. Answers that are not streamed teach
nothing: nobody sees their first token.
"""

from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, RequestId, Seconds, Tokens
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.decayed_load import DecayedLoad
from pointsman.state.workload import Request

PRIOR_VARIANCE = 1.0
"""How far a weight may be from 0 before anything is learned, in seconds a unit of its feature, squared."""

Features = tuple[float, ...]


class LeastSquares:
    """Recursive least squares over `size` features. Starts at weights of 0 and knows how unsure it is of them."""

    def __init__(self, size: int, forgetting: float) -> None:
        """`forgetting`: the weight that all earlier observations keep at each new one; 1 never forgets."""
        self._forgetting = forgetting
        self._weights = [0.0] * size
        self._covariance = [[PRIOR_VARIANCE * (i == j) for j in range(size)] for i in range(size)]
        self._variance_max = PRIOR_VARIANCE * size

    def predict(self, features: Features) -> float:
        return sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))

    def learn(self, features: Features, observed: float) -> None:
        spread = [sum(c * feature for c, feature in zip(row, features, strict=True)) for row in self._covariance]
        scale = self._forgetting + sum(s * feature for s, feature in zip(spread, features, strict=True))
        error = observed - self.predict(features)
        self._weights = [w + s / scale * error for w, s in zip(self._weights, spread, strict=True)]
        self._covariance = [
            [c - si * sj / scale for c, sj in zip(row, spread, strict=True)]
            for row, si in zip(self._covariance, spread, strict=True)
        ]
        self._forget()

    def _forget(self) -> None:
        """Grow less sure, but never less than at the start: where nothing new is seen for long, doubt would grow
        without bound, and one odd observation would then throw the weights."""
        variance = sum(self._covariance[i][i] for i in range(len(self._weights)))
        if variance <= self._forgetting * self._variance_max:
            self._covariance = [[c / self._forgetting for c in row] for row in self._covariance]


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What was known of a request when it was placed, and the TTFT that load and prefill gave."""

    instance: InstanceId
    at: Seconds
    features: Features
    ttft: Seconds


class Residuals(Tracker):
    """One model an instance. Must be folded before `load`: what a request brings itself is not in its own features."""

    def __init__(self, load: DecayedLoad, forgetting: float) -> None:
        self._load = load
        self._forgetting = forgetting
        self._models: dict[InstanceId, LeastSquares] = {}
        self._predictions: dict[RequestId, _Prediction] = {}

    def seconds(self, instance: InstanceId, *, uncached: Tokens, cached: Tokens, now: Seconds) -> Seconds:
        """How much later than load and prefill say the first token of such a prompt should come; may be negative."""
        model = self._models.get(instance)
        return model.predict(self._features(instance, uncached, cached, now)) if model else 0.0

    @override
    def placed(self, request: Request, at: Seconds) -> None:
        instance, uncached = request.instance, request.uncached_tokens
        self._predictions[request.id] = _Prediction(
            instance=instance,
            at=at,
            features=self._features(instance, uncached, request.prompt_tokens - uncached, at),
            ttft=self._load.seconds(instance, at) + request.prefill_seconds,
        )

    @override
    def unplaced(self, request: Request, at: Seconds) -> None:
        self._predictions.pop(request.id, None)

    @override
    def first_token(self, request: Request, at: Seconds) -> None:
        prediction = self._predictions.pop(request.id, None)
        if prediction is None or not request.streaming:
            return
        model = self._models.get(prediction.instance)
        if model is None:
            model = self._models[prediction.instance] = LeastSquares(len(prediction.features), self._forgetting)
        model.learn(prediction.features, at - prediction.at - prediction.ttft)

    @override
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        self._predictions.pop(request.id, None)

    @override
    def left(self, instance: InstanceId, at: Seconds) -> None:
        self._models.pop(instance, None)
        self._predictions = {r: p for r, p in self._predictions.items() if p.instance != instance}

    def _features(self, instance: InstanceId, uncached: Tokens, cached: Tokens, now: Seconds) -> Features:
        """Tokens in thousands and requests in tens, so that no weight is very small."""
        load = self._load
        return (1.0, uncached / 1000, cached / 1000, load.seconds(instance, now), load.requests(instance) / 10)
