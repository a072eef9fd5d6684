"""Roofline profiles of model and hardware, and the prefill and step costs derived from them. Mooncake (FAST'25) Eq. 1:
a prefill of n tokens takes `layers * (a * n^2 * hidden + b * n * hidden^2)` operations. A decode step reads the weights
once and each sequence's KV cache."""

from dataclasses import dataclass

from pointsman.contracts.fleet import DecodeCost, PrefillCost
from pointsman.primitives import EngineSeconds, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """FLOP/s and bytes/s are effective, not peak."""

    name: str
    layers: int
    hidden: int
    attention_factor: float
    linear_factor: float
    flops_per_s: float
    weight_bytes: float
    kv_bytes_per_token: float
    memory_bytes_per_s: float
    step_overhead_s: EngineSeconds
    kv_capacity_tokens: Tokens
    decode_step_s: EngineSeconds | None = None
    """A measured decode step, without reading the KV cache; None: overhead and weights."""

    @property
    def prefill_cost(self) -> PrefillCost:
        return PrefillCost(
            fixed_s=self.step_overhead_s,
            per_token_s=self.layers * self.linear_factor * self.hidden**2 / self.flops_per_s,
            per_token_squared_s=self.layers * self.attention_factor * self.hidden / self.flops_per_s,
            floor_s=self.weight_bytes / self.memory_bytes_per_s,
        )

    @property
    def decode_cost(self) -> DecodeCost:
        return DecodeCost(
            step_s=self.step_overhead_s + self.weight_bytes / self.memory_bytes_per_s
            if self.decode_step_s is None
            else self.decode_step_s,
            per_context_token_s=self.kv_bytes_per_token / self.memory_bytes_per_s,
        )


PROFILES = {
    profile.name: profile
    for profile in (
        # 910B4: 280 TFLOP/s fp16 at 45%, 800 GB/s at 70%. The cache counts HBM and a host tier as one.
        EngineProfile(
            name="qwen2.5-7b-910b4",
            layers=28,
            hidden=3584,
            attention_factor=4.0,
            linear_factor=36.3,
            flops_per_s=126e12,
            weight_bytes=15.2e9,
            kv_bytes_per_token=57_344,
            memory_bytes_per_s=560e9,
            step_overhead_s=0.004,
            kv_capacity_tokens=1_000_000,
        ),
        # As above, with DualMap's cache of 0.5M tokens for its 14B model.
        EngineProfile(
            name="qwen2.5-14b-910b4",
            layers=48,
            hidden=5120,
            attention_factor=4.0,
            linear_factor=20.8,
            flops_per_s=126e12,
            weight_bytes=29.6e9,
            kv_bytes_per_token=196_608,
            memory_bytes_per_s=560e9,
            step_overhead_s=0.004,
            kv_capacity_tokens=500_000,
        ),
        # 8 x A800: 312 TFLOP/s at 50%, 2.04 TB/s at 70%, tensor parallel over all eight.
        EngineProfile(
            name="llama3-70b-8xa800",
            layers=80,
            hidden=8192,
            attention_factor=4.0,
            linear_factor=22.0,
            flops_per_s=8 * 156e12,
            weight_bytes=141e9,
            kv_bytes_per_token=327_680,
            memory_bytes_per_s=8 * 1.43e12,
            step_overhead_s=0.006,
            kv_capacity_tokens=1_300_000,
        ),
        # SmolLM2-135M in bf16 under vLLM's CPU build, one core with AVX2.
        EngineProfile(
            name="smollm2-135m-cpu",
            layers=30,
            hidden=576,
            attention_factor=4.0,
            linear_factor=21.3,
            flops_per_s=260e9,
            weight_bytes=0.27e9,
            kv_bytes_per_token=23_040,
            memory_bytes_per_s=12e9,
            step_overhead_s=0.015,
            kv_capacity_tokens=46_592,
        ),
    )
}
DEFAULT_PROFILE = "qwen2.5-7b-910b4"
