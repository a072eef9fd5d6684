"""Predicts prefill seconds: the cost model of an instance (Mooncake's polynomial, `contracts.fleet.PrefillCost`), and
what each instance's observed prefills taught (`Correction`)."""

from typing import ClassVar

from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.correction import Correction
from pointsman.state.derived import Derived
from pointsman.state.engine_profiles import prefill_seconds
from pointsman.state.fleet import Instance


class LatencyModel:
    DERIVED: ClassVar[Derived] = {"changed": set}

    def __init__(self, block_tokens: Tokens, *, by_length: bool = True) -> None:
        """`by_length`: False before fold version 6."""
        self._block_tokens = block_tokens
        self._by_length = by_length
        self.corrections: dict[InstanceId, Correction] = {}
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
        return prefill_seconds(instance.cost, prompt_tokens, cached_tokens)

    def expected_seconds(self, instance: InstanceId, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of any number of prompts."""
        correction = self.corrections.get(instance)
        return correction.seconds(work, tokens) if correction else work

    def expected_prefill(self, instance: InstanceId, work: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of one prompt."""
        correction = self.corrections.get(instance)
        return correction.prompt_seconds(work, tokens) if correction else work

    def correction(self, instance: InstanceId) -> float:
        """Factor on the cost model; 1 if nothing was learned."""
        correction = self.corrections.get(instance)
        return correction.factor if correction else 1.0

    def prediction_error(self, instance: InstanceId) -> float | None:
        correction = self.corrections.get(instance)
        return correction.error if correction else None

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
