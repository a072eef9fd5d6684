"""What a simulation gives back: one row a request, samples of the load over time, and what it cost to decide.

All times are engine seconds of the virtual clock, which starts at 0 with the first arrival's origin.
"""

from dataclasses import dataclass, field
from typing import Literal

from pointsman.primitives import InstanceId, Seconds, Tokens

End = Literal["finished", "rejected", "failed", "unfinished"]


@dataclass(slots=True)
class RequestRow:
    """One request, from arrival to its end. Times are None where that moment never came."""

    number: int
    tenant: str
    arrived_at: Seconds
    prompt_tokens: Tokens
    output_tokens: Tokens
    slo_ttft: Seconds
    end: End = "unfinished"
    reason: str = ""
    instance: InstanceId | None = None
    predicted_ttft: Seconds | None = None
    """What was predicted at the last placement, from arrival on."""
    predicted_cached_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    """What the engine took from its cache."""
    granted_at: Seconds | None = None
    """When it was sent to its engine, the last time."""
    first_token_at: Seconds | None = None
    ended_at: Seconds | None = None
    migrations: int = 0
    retries: int = 0

    @property
    def ttft(self) -> Seconds | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def on_time(self) -> bool:
        """Whether its first token met the objective; rejected and failed ones did not."""
        return self.end == "finished" and self.ttft is not None and self.ttft <= self.slo_ttft


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Uncached prompt tokens pending or in prefill, by instance, in the order of `Outcome.instances` at that time."""

    at: Seconds
    pending_tokens: tuple[Tokens, ...]
    running: tuple[int, ...]
    instances: tuple[InstanceId, ...]


@dataclass(slots=True)
class Outcome:
    """One run. `rows` are in the order of arrival, warm-up included; reports leave the first `warmup` out."""

    rows: list[RequestRow]
    samples: list[LoadSample] = field(default_factory=list)
    migrations: int = 0
    decisions: int = 0
    decision_seconds: float = 0.0
    """CPU time spent in deciding placements, real seconds: the one figure that is not of the virtual clock."""
    virtual_seconds: Seconds = 0.0
    instance_changes: list[tuple[Seconds, int]] = field(default_factory=list)
    """When the number of ready instances changed, and to what."""
