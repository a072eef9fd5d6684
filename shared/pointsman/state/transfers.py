"""Fetches of prefixes from other instances: those under way, by source, and how fast sources give, learned from their
ends. A fetch waits for the work inside the source's engine, then takes `(tokens under way there + its own) / rate`; the
rate is what the target announced. Both are corrected by source: fading sums of observed over predicted seconds; for a
source that gave nothing yet, what all others taught. Without fetches it is forgotten again, since only a fetch could
show that a slow source has recovered. After a failure nothing is fetched between the
two instances for a while."""

from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens, WallSeconds

FADE = 0.9
"""Per fetch: about the last ten."""
FACTOR_MIN, FACTOR_MAX = 0.01, 1000.0
FORGOTTEN_SECONDS: EngineSeconds = 60.0
"""Half-life of what was learned, without a further fetch."""
UNKNOWN_RATE = 10_000.0
"""Tokens per second where the target announced none."""
REST_WALL_SECONDS: WallSeconds = WallSeconds(30.0)


@dataclass(slots=True)
class Factor:
    """Observed over predicted seconds; 1 before, which counts like one fetch."""

    observed: EngineSeconds = 0.0
    predicted: EngineSeconds = 0.0
    at: EngineSeconds = 0.0

    def value(self, now: EngineSeconds) -> float:
        if not self.predicted:
            return 1.0
        learned = min(FACTOR_MAX, max(FACTOR_MIN, self.observed / self.predicted))
        return float(1.0 + (learned - 1.0) * 0.5 ** (max(0.0, now - self.at) / FORGOTTEN_SECONDS))

    def learn(self, *, predicted: EngineSeconds, observed: EngineSeconds, at: EngineSeconds) -> None:
        if not self.predicted:
            self.observed = self.predicted = predicted
        self.observed = FADE * self.observed + observed
        self.predicted = FADE * self.predicted + predicted
        self.at = at


class Factors:
    def __init__(self) -> None:
        self._all = Factor()
        self._by_source: dict[InstanceId, Factor] = {}

    def of(self, source: InstanceId, now: EngineSeconds) -> float:
        return self._by_source.get(source, self._all).value(now)

    def learn(
        self, source: InstanceId, *, predicted: EngineSeconds, observed: EngineSeconds, at: EngineSeconds
    ) -> None:
        for factor in (self._by_source.setdefault(source, Factor()), self._all):
            factor.learn(predicted=predicted, observed=observed, at=at)

    def forget(self, source: InstanceId) -> None:
        self._by_source.pop(source, None)


@dataclass(frozen=True, slots=True)
class FetchUnderWay:
    """Seconds as predicted without correction."""

    tokens: Tokens
    wait_seconds: EngineSeconds
    transfer_seconds: EngineSeconds


class Transfers:
    def __init__(self) -> None:
        self.under_way: dict[InstanceId, dict[RequestId, FetchUnderWay]] = {}
        """By source."""
        self.waits = Factors()
        self.rates = Factors()
        self._rests_until: dict[tuple[InstanceId, InstanceId], EngineSeconds] = {}

    def seconds(
        self, source: InstanceId, tokens: Tokens, rate: float, now: EngineSeconds, *, wait: EngineSeconds
    ) -> EngineSeconds:
        """`rate`: tokens per second, 0: unknown. `wait`: for the source's engine. Both uncorrected."""
        transfer = self.rates.of(source, now) * self._transfer_seconds(source, tokens, rate)
        return self.wait_seconds(source, wait, now) + transfer

    def wait_seconds(self, source: InstanceId, wait: EngineSeconds, now: EngineSeconds) -> EngineSeconds:
        return wait * self.waits.of(source, now)

    def rests(self, source: InstanceId, target: InstanceId, now: EngineSeconds) -> bool:
        return self._rests_until.get((source, target), now) > now

    def begin(
        self, request: RequestId, source: InstanceId, tokens: Tokens, rate: float, *, wait: EngineSeconds
    ) -> None:
        fetch = FetchUnderWay(tokens, wait, self._transfer_seconds(source, tokens, rate))
        self.under_way.setdefault(source, {})[request] = fetch

    def end(self, request: RequestId, source: InstanceId) -> FetchUnderWay | None:
        giving = self.under_way.get(source, {})
        ended = giving.pop(request, None)
        if not giving:
            self.under_way.pop(source, None)
        return ended

    def learn(
        self,
        source: InstanceId,
        fetch: FetchUnderWay,
        at: EngineSeconds,
        *,
        waited: EngineSeconds,
        transferred: EngineSeconds,
    ) -> None:
        self.waits.learn(source, predicted=fetch.wait_seconds, observed=waited, at=at)
        self.rates.learn(source, predicted=fetch.transfer_seconds, observed=transferred, at=at)

    def rest(self, source: InstanceId, target: InstanceId, *, until: EngineSeconds) -> None:
        self._rests_until[source, target] = until

    def forget_rests(self, until: EngineSeconds) -> None:
        """Those that are over by then."""
        self._rests_until = {pair: end for pair, end in self._rests_until.items() if end > until}

    def forget(self, instance: InstanceId) -> None:
        self.waits.forget(instance)
        self.rates.forget(instance)
        self._rests_until = {pair: until for pair, until in self._rests_until.items() if instance not in pair}

    def _transfer_seconds(self, source: InstanceId, tokens: Tokens, rate: float) -> EngineSeconds:
        ahead = sum(fetch.tokens for fetch in self.under_way.get(source, {}).values())
        return (ahead + tokens) / (rate or UNKNOWN_RATE)
