"""What a policy chooses from: what each instance would be for one request (`pool_view` makes them)."""

from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from pointsman.contracts.decisions import Candidate, TierTokens
from pointsman.primitives import NO_SECONDS, EngineSeconds, InstanceId, Tokens
from pointsman.state.workload import NO_INSTANCE


class CandidateEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance would be for the request. Seconds include the learned correction, except `work_seconds`."""

    instance: InstanceId
    hit_blocks: int
    """Leading blocks of the prompt that it holds, or will from requests placed there."""
    cached_tokens: Tokens
    """That the hit saves: whole engine blocks, and never the last token. The others are `uncached_tokens`."""
    uncached_tokens: Tokens
    queue_seconds: EngineSeconds
    """Until the prefills before this one are done."""
    prefill_seconds: EngineSeconds
    """Of its uncached tokens inside the engine; with a fetch, of those that remain."""
    work_seconds: EngineSeconds
    """Prefill by the cost model alone; booked in the queue of the instance."""
    queued_tokens: Tokens
    """Uncached, of requests without a first token: pending here, or in prefill inside the engine."""
    queued_requests: int
    requests: int
    transfer_seconds: EngineSeconds = 0.0
    fetch_from: InstanceId = NO_INSTANCE
    """Where `fetched_tokens` beyond the hit are fetched from, since that is sooner than computing them."""
    fetched_tokens: Tokens = 0
    interval_of: tuple[EngineSeconds, EngineSeconds] = (0.0, 0.0)
    """Predicted seconds and work by which `TtftIntervals.factor` is chosen: without what policies add, nor fetches."""
    loads: tuple[TierTokens, ...] = ()
    """Cached tokens that only slower tiers hold."""
    load_seconds: EngineSeconds = 0.0
    """Of `loads`, from the slower tier into the engine's memory."""
    margin_seconds: EngineSeconds = 0.0
    """By which its first token may come later, since it waits (`LatencyModel.margin_seconds`)."""

    @property
    def loaded_tokens(self) -> Tokens:
        return sum(load.tokens for load in self.loads) if self.loads else 0

    @property
    def ttft_with_margin(self) -> EngineSeconds:
        """What must be within the TTFT budget of a request that is to be on time."""
        return self.predicted_ttft + self.margin_seconds

    @property
    def predicted_ttft(self) -> EngineSeconds:
        return self.queue_seconds + self.prefill_seconds + self.load_seconds + self.transfer_seconds

    @property
    def ttft_alone(self) -> EngineSeconds:
        """If the request had the instance for itself."""
        return self.predicted_ttft - self.queue_seconds

    def recorded(self) -> Candidate:
        return Candidate(
            instance=self.instance,
            hit_blocks=self.hit_blocks,
            uncached_tokens=self.uncached_tokens,
            queue_seconds=self.queue_seconds,
            prefill_seconds=self.prefill_seconds,
            predicted_ttft=self.predicted_ttft,
            fetch_from=self.fetch_from,
            fetched_tokens=self.fetched_tokens,
            transfer_seconds=self.transfer_seconds if self.fetch_from and self.transfer_seconds else NO_SECONDS,
            loaded_tokens=self.loaded_tokens,
        )


class LazyCandidates(Sequence[CandidateEstimate]):
    """Estimates that are made when they are looked at."""

    @abstractmethod
    def recorded(self, chosen: InstanceId, *, by_ttft: int, by_hit: int) -> list[Candidate]:
        """The chosen one, so many with the least predicted TTFT, and of the rest so many with the longest hits, in their
        order."""
