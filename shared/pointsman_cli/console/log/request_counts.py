"""Counts of requests: of each tenant since the console began to read, and of all that ended in the last minute."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.simulation.metrics import percentile
from pointsman_cli.console.log.recent_requests import CANCELLED, FAILED, FINISHED, REJECTED, RecentRequest

WINDOW_WALL_SECONDS = 60.0
WINDOW_ENDS_MAX = 20_000
TENANTS_MAX = 1_000
OTHER_TENANTS = "other"
TTFTS_MAX = 200
"""Newest of each tenant, for its percentiles."""


@dataclass(slots=True)
class Figures:
    """Of some ended requests. Tokens are of those whose engine told what was cached."""

    ended: int = 0
    in_time: int = 0
    judged: int = 0
    rejected: int = 0
    failed: int = 0
    """Or cut off, by anybody but their clients."""
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    predicted_tokens: Tokens = 0
    ttfts: list[float] = field(default_factory=list)

    def add(self, record: RecentRequest) -> None:
        self.ended += 1
        self.in_time += record.lateness == "in time"
        self.judged += record.judged
        self.rejected += record.stage == REJECTED
        self.failed += record.judged and record.stage in (FAILED, CANCELLED)
        if record.ttft is not None:
            self.ttfts.append(record.ttft)
        if record.cached_tokens >= 0:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens
            self.predicted_tokens += max(0, record.predicted_cached_tokens)

    @property
    def goodput(self) -> float | None:
        return round(self.in_time / self.judged, 3) if self.judged else None

    @property
    def hit_rate(self) -> float | None:
        return round(self.cached_tokens / self.prompt_tokens, 3) if self.prompt_tokens else None

    @property
    def predicted_hit_rate(self) -> float | None:
        return round(self.predicted_tokens / self.prompt_tokens, 3) if self.prompt_tokens else None

    def ttft(self, percent: float) -> float | None:
        found = percentile(self.ttfts, percent)
        return None if found is None else round(found, 3)


@dataclass(slots=True)
class LastMinute:
    seconds: EngineSeconds
    ends: deque[tuple[EngineSeconds, RecentRequest]] = field(default_factory=lambda: deque(maxlen=WINDOW_ENDS_MAX))
    arrivals: deque[EngineSeconds] = field(default_factory=lambda: deque(maxlen=WINDOW_ENDS_MAX))
    placed_alone: deque[EngineSeconds] = field(default_factory=lambda: deque(maxlen=WINDOW_ENDS_MAX))
    """By ingresses, without a scheduler."""

    def end(self, record: RecentRequest) -> None:
        assert record.end is not None
        self.ends.append((record.end.at, record))

    def take_back(self, record: RecentRequest) -> None:
        assert record.end is not None
        with suppress(ValueError):  # it is older than the window
            self.ends.remove((record.end.at, record))

    def figures(self, now: EngineSeconds) -> tuple[Figures, dict[str, Figures]]:
        """Of all, and by instance."""
        self._forget(now)
        whole, of = Figures(), dict[str, Figures]()
        for _, record in self.ends:
            whole.add(record)
            if record.instance:
                of.setdefault(record.instance, Figures()).add(record)
        return whole, of

    def arrivals_per_second(self, now: EngineSeconds, began: EngineSeconds) -> float:
        """`began`: when the record begins, which may be less than a minute ago."""
        self._forget(now)
        span = min(self.seconds, max(1e-3, now - began))
        return round(len(self.arrivals) / span, 1)

    def _forget(self, now: EngineSeconds) -> None:
        since = now - self.seconds
        while self.ends and self.ends[0][0] < since:
            self.ends.popleft()
        for times in (self.arrivals, self.placed_alone):
            while times and times[0] < since:
                times.popleft()


@dataclass(slots=True)
class TenantTally:
    arrived: int = 0
    finished: int = 0
    in_time: int = 0
    late: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    judged: int = 0
    prompt_tokens: Tokens = 0
    told_tokens: Tokens = 0
    """Prompt tokens of answers that told what was cached."""
    cached_tokens: Tokens = 0
    output_tokens: Tokens = 0
    ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=TTFTS_MAX))

    def end(self, record: RecentRequest) -> None:
        late = record.lateness == "late"
        self.finished += record.stage == FINISHED
        self.in_time += record.stage == FINISHED and not late
        self.late += record.stage == FINISHED and late
        self.rejected += record.stage == REJECTED
        self.failed += record.stage == FAILED
        self.cancelled += record.stage == CANCELLED
        self.judged += record.judged
        if record.cached_tokens >= 0:
            self.told_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens
        self.output_tokens += max(0, record.output_tokens)
        if record.ttft is not None:
            self.ttfts.append(record.ttft)

    def take_back(self, record: RecentRequest) -> None:
        """What its leader ended, and its ingress ends now or asks for again under another id."""
        self.rejected -= record.stage == REJECTED
        self.cancelled -= record.stage == CANCELLED
        self.judged -= record.judged
        self.output_tokens -= max(0, record.output_tokens)
        if record.ttft is not None:
            with suppress(ValueError):  # newer ones took its place
                self.ttfts.remove(record.ttft)


@dataclass(slots=True)
class Tenants:
    tallies: dict[str, TenantTally] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantTally:
        known = self.tallies.get(tenant)
        if known is None:
            name = tenant if len(self.tallies) < TENANTS_MAX else OTHER_TENANTS
            known = self.tallies.setdefault(name, TenantTally())
        return known
