"""Seconds of a step by the roofline: `overhead + max(compute, memory)`. Compute grows with tokens and attention
(`q^2 - p^2` for a chunk from p to q), memory with the weights and the KV cache of decoding requests. Runs of decode
steps have a closed form. Where a decode step was measured (`EngineProfile.decode_step_s`), its overhead and weights
replace those of a prefill."""

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.state.engine_profiles import EngineProfile


class StepCost:
    def __init__(self, profile: EngineProfile) -> None:
        cost = profile.prefill_cost
        self._overhead_s = profile.step_overhead_s
        self._token_s = cost.per_token_s
        self._square_s = cost.per_token_squared_s
        self._weights_s = profile.weight_bytes / profile.memory_bytes_per_s
        self._decode_overhead_s, self._decode_weights_s = self._overhead_s, self._weights_s
        if profile.decode_step_s is not None:
            self._decode_overhead_s = max(0.0, min(self._overhead_s, profile.decode_step_s - cost.per_token_s))
            self._decode_weights_s = profile.decode_step_s - self._decode_overhead_s
        self._kv_token_s = profile.kv_bytes_per_token / profile.memory_bytes_per_s

    def step(self, chunk_tokens: Tokens, chunk_squares: int, decoding: int, context: Tokens) -> EngineSeconds:
        """`context`: computed tokens of all decoding requests."""
        squares = chunk_squares + 2 * context + decoding
        compute = self._token_s * (chunk_tokens + decoding) + self._square_s * squares
        overhead, weights = self._decode_overhead_s, self._decode_weights_s
        if chunk_tokens:
            overhead, weights = self._overhead_s, max(self._weights_s, weights) if decoding else self._weights_s
        return overhead + max(compute, weights + self._kv_token_s * context)

    def decode_run(self, decoding: int, context: Tokens, count_max: int) -> tuple[int, EngineSeconds]:
        """The longest run of at most `count_max` steps on one side of the roofline, and its seconds."""
        compute_first, compute_more, memory_first, memory_more = self._linear_terms(decoding, context)
        above, closing = memory_first - compute_first, compute_more - memory_more
        count = count_max
        if closing and above / closing >= 0:
            count = max(1, min(count_max, int(above / closing) + 1))
        return count, self.decode_steps(decoding, context, count)

    def decode_steps(self, decoding: int, context: Tokens, count: int) -> EngineSeconds:
        compute_first, compute_more, memory_first, memory_more = self._linear_terms(decoding, context)
        first, more = (compute_first, compute_more) if compute_first > memory_first else (memory_first, memory_more)
        return count * (self._decode_overhead_s + first) + more * (count * (count - 1) / 2)

    def _linear_terms(self, decoding: int, context: Tokens) -> tuple[float, float, float, float]:
        """Compute and memory time of the next decode step, each with its growth per step."""
        return (
            self._token_s * decoding + self._square_s * (2 * context + decoding),
            self._square_s * 2 * decoding,
            self._decode_weights_s + self._kv_token_s * context,
            self._kv_token_s * decoding,
        )
