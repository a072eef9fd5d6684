"""Fetches of prefixes from other instances: those under way, by source, and how fast a source gives, learned from their
ends. A fetch takes `(tokens under way at the source + its own) / rate * factor`; the rate is what the target announced,
the factor a fading sum of observed over predicted seconds, by source. After a failure the pair rests."""

from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens

FADE = 0.9
"""Per fetch: about the last ten."""
PRIOR_SECONDS = 0.1
FACTOR_MIN, FACTOR_MAX = 0.02, 50.0
UNKNOWN_RATE = 10_000.0
"""Tokens per second where the target announced none."""
REST_WALL_SECONDS = 30.0


@dataclass(slots=True)
class FetchRate:
    observed: EngineSeconds = PRIOR_SECONDS
    predicted: EngineSeconds = PRIOR_SECONDS

    @property
    def factor(self) -> float:
        return min(FACTOR_MAX, max(FACTOR_MIN, self.observed / self.predicted))

    def learn(self, *, predicted: EngineSeconds, observed: EngineSeconds) -> None:
        self.observed = FADE * self.observed + observed
        self.predicted = FADE * self.predicted + predicted


@dataclass(frozen=True, slots=True)
class FetchUnderWay:
    tokens: Tokens
    plain_seconds: EngineSeconds


class Transfers:
    def __init__(self) -> None:
        self.under_way: dict[InstanceId, dict[RequestId, FetchUnderWay]] = {}
        """By source."""
        self.rates: dict[InstanceId, FetchRate] = {}
        self._rests_until: dict[tuple[InstanceId, InstanceId], EngineSeconds] = {}

    def plain_seconds(self, source: InstanceId, tokens: Tokens, rate: float) -> EngineSeconds:
        """As announced: nothing learned. `rate`: tokens per second; 0: unknown."""
        ahead = sum(fetch.tokens for fetch in self.under_way.get(source, {}).values())
        return (ahead + tokens) / (rate or UNKNOWN_RATE)

    def seconds(self, source: InstanceId, tokens: Tokens, rate: float) -> EngineSeconds:
        learned = self.rates.get(source)
        return self.plain_seconds(source, tokens, rate) * (learned.factor if learned else 1.0)

    def rests(self, source: InstanceId, target: InstanceId, now: EngineSeconds) -> bool:
        return self._rests_until.get((source, target), now) > now

    def begin(self, request: RequestId, source: InstanceId, tokens: Tokens, rate: float) -> None:
        fetch = FetchUnderWay(tokens, self.plain_seconds(source, tokens, rate))
        self.under_way.setdefault(source, {})[request] = fetch

    def end(self, request: RequestId, source: InstanceId) -> FetchUnderWay | None:
        giving = self.under_way.get(source, {})
        ended = giving.pop(request, None)
        if not giving:
            self.under_way.pop(source, None)
        return ended

    def learn(self, source: InstanceId, *, predicted: EngineSeconds, observed: EngineSeconds) -> None:
        self.rates.setdefault(source, FetchRate()).learn(predicted=predicted, observed=observed)

    def rest(self, source: InstanceId, target: InstanceId, *, until: EngineSeconds) -> None:
        self._rests_until[source, target] = until

    def forget(self, instance: InstanceId) -> None:
        self.rates.pop(instance, None)
        self._rests_until = {pair: until for pair, until in self._rests_until.items() if instance not in pair}
