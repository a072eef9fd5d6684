"""Predicts prefill seconds: the cost model of an instance (Mooncake's polynomial, `contracts.fleet.PrefillCost`), and
what each instance's observed prefills taught: how long a prompt takes inside the engine (`Correction`), and how fast the
engine completes what is ahead of it (`PrefillRate`)."""

from typing import ClassVar

from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.correction import Correction
from pointsman.state.derived import Derived
from pointsman.state.fleet import Instance
from pointsman.state.prefill_rate import PrefillRate, StepMargin


class LatencyModel:
    DERIVED: ClassVar[Derived] = {"changed": set}

    def __init__(self, block_tokens: Tokens, *, by_length: bool = True, by_rate: bool = True) -> None:
        """`by_length`: False before fold version 6. `by_rate`: False before 7; work ahead is corrected as a prompt is."""
        self._block_tokens = block_tokens
        self._by_length = by_length
        self._by_rate = by_rate
        self.corrections: dict[InstanceId, Correction] = {}
        self.rates: dict[InstanceId, PrefillRate] = {}
        self.margin = StepMargin()
        self.changed: set[InstanceId] = set()
        """Whose corrections have changed since somebody (`InstanceColumns`) cleared it."""

    def cached_tokens(self, instance: Instance, hit_blocks: int, prompt_tokens: Tokens) -> Tokens:
        """Prompt tokens that a hit saves: whole engine blocks, and never the last token, which is always computed."""
        if not hit_blocks:
            return 0
        usable = (prompt_tokens - 1) // instance.engine_block_tokens * instance.engine_block_tokens
        return max(0, min(hit_blocks * self._block_tokens, usable))

    def prefill_seconds(self, instance: Instance, prompt_tokens: Tokens, cached_tokens: Tokens) -> EngineSeconds:
        """By the uncorrected cost model."""
        return instance.cost.seconds(prompt_tokens, cached_tokens)

    def expected_seconds(self, instance: InstanceId, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of any number of prompts, one after another."""
        correction = self.of_work(instance)
        return correction.seconds(work, tokens) if correction else work

    def expected_prefill(self, instance: InstanceId, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of one prompt."""
        correction = self.corrections.get(instance)
        return correction.prompt_seconds(work, tokens) if correction else work

    def of_work(self, instance: InstanceId) -> Correction | None:
        """What `expected_seconds` goes by."""
        if not self._by_rate:
            return self.corrections.get(instance)
        rate = self.rates.get(instance)
        return rate.correction if rate else None

    def step_seconds(self, instance: InstanceId) -> EngineSeconds:
        """Of a full step of its engine; 0 if none was seen."""
        rate = self.rates.get(instance)
        return rate.step_seconds if rate else 0.0

    def margin_seconds(self, instance: InstanceId, ahead: EngineSeconds) -> EngineSeconds:
        """By which a first token behind so many seconds of work may come later than predicted (`StepMargin`)."""
        return self.margin.steps * min(ahead, self.step_seconds(instance))

    def correction(self, instance: InstanceId) -> float:
        """Factor on the cost model; 1 if nothing was learned."""
        correction = self.corrections.get(instance)
        return correction.factor if correction else 1.0

    def prediction_error(self, instance: InstanceId) -> float | None:
        correction = self.corrections.get(instance)
        return correction.error if correction else None

    def first_token(
        self, instance: InstanceId, *, passed: EngineSeconds, work: EngineSeconds, tokens: Tokens
    ) -> EngineSeconds:
        """See `PrefillRate.first_token`. Returns work that a step does beside its first prompt; 0 if not known."""
        if not self._by_rate:
            return 0.0
        self.changed.add(instance)
        rate = self.rates.setdefault(instance, PrefillRate())
        rate.first_token(passed=passed, work=work, tokens=tokens)
        return rate.beside_seconds

    def learn(
        self,
        instance: InstanceId,
        *,
        predicted: EngineSeconds,
        observed: EngineSeconds,
        tokens: Tokens,
        own_tokens: Tokens = 0,
    ) -> None:
        self.changed.add(instance)
        correction = self.corrections.setdefault(instance, Correction(by_length=self._by_length))
        correction.learn(predicted=predicted, observed=observed, tokens=tokens, own_tokens=own_tokens)

    def forget(self, instance: InstanceId) -> None:
        self.changed.add(instance)
        self.corrections.pop(instance, None)
        self.rates.pop(instance, None)
