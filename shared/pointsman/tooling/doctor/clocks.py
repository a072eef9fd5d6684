"""Clocks: do the processes agree on what time it is, and do events come when they happen?

Entries carry the time of who wrote them, and stand in the order in which they were stored. Where entries of two
processes follow each other, the difference of their times is the time between them, plus how far their clocks are
apart; in the other order, minus. So half the difference of both medians is the skew, whatever the traffic.
"""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from typing_extensions import override

from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestRejected
from pointsman.contracts.fleet import FleetEvent, InstanceProbed
from pointsman.contracts.requests import RequestArrived, RequestEvent
from pointsman.primitives import RequestId, Seconds
from pointsman.state.state import PoolSettings, State
from pointsman.tooling.doctor.examination import Examiner
from pointsman.tooling.doctor.findings import Finding, Severity
from pointsman.tooling.doctor.samples import Sample

AREA = "clocks"
SKEW_WALL_SECONDS = 0.5
SKEW_SERIOUS_WALL_SECONDS = 1.5
"""Half of the silence after which an instance is suspected."""

PAIRS_MIN = 20
"""In each order."""

LATE_WALL_SECONDS = 2.0
LATE_SHARE_MAX = 0.01
WRITERS_MAX = 256
INGRESSES_REMEMBERED_MAX = 50_000
LEADER = "scheduler"


class Clocks(Examiner):
    """Every process against the scheduler, which is told most often; and events that stand behind much later ones."""

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._ingress_of: dict[RequestId, str] = {}
        self._before: tuple[str, Seconds] | None = None
        self._steps: dict[tuple[str, str], Sample[Seconds]] = {}
        self._newest: Seconds = 0.0
        self._late: Counter[str] = Counter()
        self._latest: dict[str, Seconds] = {}
        self._events: Counter[str] = Counter()

    @override
    def before(self, event: LogEvent, state: State) -> None:
        writer = self._writer(event)
        if writer is None:
            return
        self._note_lateness(event, writer)
        if self._before is not None and self._before[0] != writer:
            self._step(self._before[0], writer, event.at - self._before[1])
        self._before = writer, event.at

    def _note_lateness(self, event: LogEvent, writer: str) -> None:
        name = f"{type(event).__name__} of {writer}"
        lateness = self.wall(self._newest - event.at)
        if len(self._events) < 8 * WRITERS_MAX or name in self._events:
            self._events[name] += 1
            if lateness > LATE_WALL_SECONDS:
                self._late[name] += 1
                self._latest[name] = max(lateness, self._latest.get(name, 0.0))
        self._newest = max(self._newest, event.at)

    def _step(self, earlier: str, later: str, seconds: Seconds) -> None:
        if LEADER not in (earlier, later):
            return
        pair = (earlier, later)
        if pair in self._steps or len(self._steps) < 2 * WRITERS_MAX:
            self._steps.setdefault(pair, Sample(512)).add(self.wall(seconds))

    def _writer(self, event: LogEvent) -> str | None:
        """Which process wrote it; None where that cannot be told."""
        if event.stamp is not None or isinstance(event, LeaderElected | RequestRejected):
            if isinstance(event, RequestArrived):
                self._ingress_of[event.request] = event.ingress
                if len(self._ingress_of) > INGRESSES_REMEMBERED_MAX:
                    del self._ingress_of[next(iter(self._ingress_of))]
            return LEADER
        if isinstance(event, InstanceProbed):
            return None
        if isinstance(event, CacheEvent | FleetEvent):
            return f"worker {event.instance}"
        if isinstance(event, RequestEvent):
            return self._ingress_of.get(event.request)
        return None

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        skews = {writer: skew for writer in self._writers() if (skew := self._skew(writer)) is not None}
        far = {writer: skew for writer, skew in skews.items() if abs(skew) > SKEW_WALL_SECONDS}
        if far:
            worst = max(abs(skew) for skew in far.values())
            yield Finding(
                severity=Severity.SERIOUS if worst > SKEW_SERIOUS_WALL_SECONDS else Severity.WARNING,
                area=AREA,
                what=f"clocks differ from the scheduler's by up to {worst:.1f} s",
                evidence=[f"{w} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for w, s in sorted(far.items())],
                advice="Synchronise the machines' clocks (NTP). Silence, objectives and TTFT are all measured across them.",
            )
        yield from self._lateness()

    def _lateness(self) -> Iterator[Finding]:
        if not self._late:
            return
        share = self._late.total() / max(1, self._events.total())
        yield Finding(
            severity=Severity.WARNING if share > LATE_SHARE_MAX else Severity.NOTE,
            area=AREA,
            what=f"{self._late.total():,} events ({share:.1%}) came more than {LATE_WALL_SECONDS:.0f} s after later ones",
            evidence=[f"{n:,} {name}, up to {self._latest[name]:.1f} s" for name, n in self._late.most_common(5)],
            advice="Their writers were slow or could not reach nats-server for a while. Decisions in between did not know of them.",
        )

    def _writers(self) -> list[str]:
        return sorted({writer for pair in self._steps for writer in pair} - {LEADER})

    def _skew(self, writer: str) -> Seconds | None:
        """How far its clock is ahead of the scheduler's; None where too little is known."""
        behind, ahead = self._steps.get((writer, LEADER)), self._steps.get((LEADER, writer))
        if behind is None or ahead is None or min(behind.seen, ahead.seen) < PAIRS_MIN:
            return None
        return (median(ahead.values) - median(behind.values)) / 2
