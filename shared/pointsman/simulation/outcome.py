"""Results of a simulation: one row per request, and load samples. Times are virtual engine seconds."""

from dataclasses import dataclass, field
from typing import Literal

from pointsman.contracts.fleet import Role
from pointsman.contracts.requests import PrefixCopyEnded, PrefixFetchEnded
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.simulation.workload.requests import SLO_TPOT

End = Literal["finished", "rejected", "failed", "unfinished"]


@dataclass(slots=True)
class RequestRow:
    """Times are None if that moment never came."""

    number: int
    tenant: str
    arrived_at: EngineSeconds
    prompt_tokens: Tokens
    output_tokens: Tokens
    slo_ttft: EngineSeconds
    slo_tpot: EngineSeconds = SLO_TPOT
    end: End = "unfinished"
    reason: str = ""
    instance: InstanceId | None = None
    predicted_ttft: EngineSeconds | None = None
    predicted_ttft_upper: EngineSeconds | None = None
    predicted_cached_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    loaded_tokens: Tokens = 0
    """Of `cached_tokens`: loaded back from the host tier."""
    granted_at: EngineSeconds | None = None
    first_token_at: EngineSeconds | None = None
    ended_at: EngineSeconds | None = None
    tbt_p90: EngineSeconds | None = None
    """90th percentile of the gaps between its tokens; None with fewer than two tokens."""
    migrations: int = 0
    retries: int = 0
    best_effort: bool = False
    fetched_tokens: Tokens = 0
    """From another instance; of its `cached_tokens`."""

    @property
    def ttft(self) -> EngineSeconds | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def on_time(self) -> bool:
        return self.end == "finished" and self.ttft is not None and self.ttft <= self.slo_ttft

    @property
    def in_pace(self) -> bool:
        """Its time between tokens met its objective, or it had only one token."""
        return self.tbt_p90 is None or self.tbt_p90 <= self.slo_tpot


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Uncached tokens without a first token, and decoding requests, of each of `instances`."""

    at: EngineSeconds
    pending_tokens: tuple[Tokens, ...]
    running: tuple[int, ...]
    instances: tuple[InstanceId, ...]


@dataclass(slots=True)
class Outcome:
    """`rows` in the order of arrival, warm-up included."""

    rows: list[RequestRow]
    samples: list[LoadSample] = field(default_factory=list)
    migrations: int = 0
    decisions: int = 0
    decision_seconds: float = 0.0
    virtual_seconds: EngineSeconds = 0.0
    fetches: int = 0
    fetches_failed: int = 0
    fetch_seconds: EngineSeconds = 0.0
    copies: int = 0
    copies_failed: int = 0
    instance_changes: list[tuple[EngineSeconds, int]] = field(default_factory=list)
    """(time, ready instances) at each change."""
    role_changes: list[tuple[EngineSeconds, InstanceId, Role]] = field(default_factory=list)

    def note_fetch(self, event: PrefixFetchEnded) -> None:
        self.fetches += 1
        self.fetches_failed += bool(event.failure)
        self.fetch_seconds += event.seconds

    def note_copy(self, event: PrefixCopyEnded) -> None:
        self.copies += 1
        self.copies_failed += bool(event.failure)
