"""Clocks: skew of each process against the scheduler's entries around its own, and late events."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from typing_extensions import override

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestRejected
from pointsman.contracts.fleet import FleetEvent, InstanceProbed
from pointsman.contracts.requests import RequestEvent
from pointsman.primitives import EngineSeconds
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.samples import Sample

SKEW_WALL_SECONDS = 0.5
SKEW_SERIOUS_WALL_SECONDS = 1.5
"""Half of the silence after which an instance is suspected."""
BRACKETS_MIN = 10
BRACKET_WALL_SECONDS_MAX = 1.0
LATE_WALL_SECONDS = 2.0
LATE_SHARE_MAX = 0.01
WRITERS_MAX = 256
LEADER = "scheduler"


_Kind = tuple[str, str]
"""An event's type and its writer."""


class Clocks(Examiner):
    area = "clocks"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._leader_at: EngineSeconds | None = None
        self._open: dict[str, EngineSeconds] = {}
        self._skews: dict[str, Sample[EngineSeconds]] = {}
        self._late: Counter[_Kind] = Counter()
        self._latest: dict[_Kind, EngineSeconds] = {}
        self._events: Counter[_Kind] = Counter()

    @override
    def before(self, event: LogEvent, state: State) -> None:
        writer = self._writer(event)
        if writer is None:
            return
        self._note_lateness(event, writer)
        if writer == LEADER:
            self._close_brackets(event.at)
            self._leader_at = event.at
        elif len(self._open) < WRITERS_MAX:
            self._open.setdefault(writer, event.at)

    def _note_lateness(self, event: LogEvent, writer: str) -> None:
        """By the leader's clock: another may be ahead."""
        kind = (type(event).__name__, writer)
        lateness = self.wall(self._leader_at - event.at) if self._leader_at is not None else 0.0
        if len(self._events) < 8 * WRITERS_MAX or kind in self._events:
            self._events[kind] += 1
            if lateness > LATE_WALL_SECONDS:
                self._late[kind] += 1
                self._latest[kind] = max(lateness, self._latest.get(kind, 0.0))

    def _close_brackets(self, now: EngineSeconds) -> None:
        before, self._open, found = self._leader_at, {}, self._open
        if before is None or not 0 <= self.wall(now - before) <= BRACKET_WALL_SECONDS_MAX:
            return
        for writer, at in found.items():
            if writer in self._skews or len(self._skews) < WRITERS_MAX:
                self._skews.setdefault(writer, Sample(512)).add(self.wall(at - (before + now) / 2))

    def _writer(self, event: LogEvent) -> str | None:
        if event.stamp is not None or isinstance(event, LeaderElected | RequestRejected):
            return LEADER
        if isinstance(event, InstanceProbed):
            return None
        if isinstance(event, CacheEvent | FleetEvent):
            return f"worker {event.instance}"
        if isinstance(event, RequestEvent):
            return self.hangs.ingress_of(event.request)
        return None

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        skews = {w: median(sample.values) for w, sample in self._skews.items() if sample.seen >= BRACKETS_MIN}
        far = {writer: skew for writer, skew in skews.items() if abs(skew) > SKEW_WALL_SECONDS}
        if far:
            worst = max(abs(skew) for skew in far.values())
            yield self.finding(
                Severity.SERIOUS if worst > SKEW_SERIOUS_WALL_SECONDS else Severity.WARNING,
                f"clocks differ from the scheduler's by up to {worst:.1f} s",
                [f"{w} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for w, s in sorted(far.items())],
                "Synchronise the machines' clocks (NTP): decisions allow for the difference, but dates of logs and traces disagree.",
            )
        yield from self._lateness({kind for kind in self._events if kind[1] in far})

    def _lateness(self, unjudged: set[_Kind]) -> Iterator[Finding]:
        """`unjudged`: of clocks that are wrong."""
        late = Counter({kind: count for kind, count in self._late.items() if kind not in unjudged})
        if not late:
            return
        share = late.total() / sum(count for kind, count in self._events.items() if kind not in unjudged)
        yield self.finding(
            Severity.WARNING if share > LATE_SHARE_MAX else Severity.NOTE,
            f"{late.total():,} events ({share:.1%}) came more than {LATE_WALL_SECONDS:.0f} s after later ones",
            [f"{n:,} {kind[0]} of {kind[1]}, up to {self._latest[kind]:.1f} s" for kind, n in late.most_common(5)],
            "Their writers were slow or could not reach nats-server for a while. Decisions in between were made without them.",
        )
