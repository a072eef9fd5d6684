"""The log itself: completeness, dead letters, lost writes, leader changes; how slowly it took the leader's writes, and how little of
the past a full one keeps."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import FleetDescribed
from pointsman.contracts.decisions import LeaderElected, RequestsRefused, WritesLost
from pointsman.contracts.reasons import RejectReason
from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import EngineSeconds, Sequence, Term
from pointsman.state.state import PoolSettings, State
from pointsman_cli.command_client import STALLED_ADVICE, stalled_log
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity, times
from pointsman_cli.explain.causes import Cause

EVIDENCE_MAX = 5
LEADERLESS_WALL_SECONDS = 2.0
TERMS_A_HOUR_MAX = 6
REFUSING: dict[str, tuple[str, str]] = {
    RejectReason.LOG_OVERLOADED: (
        "log",
        "The disk of nats-server is full, takes writes too slowly, or is shared by too many processes: see its latency "
        "(pointsman_log_write_load_ratio), give it a faster disk, or longer --flush-ms at the workers.",
    ),
    RejectReason.SCHEDULER_OVERLOADED: (
        "scheduler",
        "The leader decides in one process: give it a core of its own (pointsman_scheduler_request_wait_seconds), or "
        "split the engines into several pools.",
    ),
}


FULL_SHARE = 0.9
KEPT_WALL_SECONDS = 3600.0


class LogHealth(Examiner):
    area = "log"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self.recorded_holes: tuple[str, ...] = ()
        """As its recorder told them, and why."""
        self._blind = False
        self._first: Sequence = 0
        self._last: Sequence = 0
        self._holes: list[tuple[Sequence, Sequence]] = []
        self._missing = 0
        self._undecodable: list[str] = []
        self._undecodables = 0
        self._lost: Counter[str] = Counter()
        self._lost_reasons: dict[str, str] = {}
        self._refused: Counter[str] = Counter()
        self._refused_for: defaultdict[str, EngineSeconds] = defaultdict(float)
        self._leaders: list[LeaderElected] = []
        self._changes = 0
        self._fenced_before = 0
        self._rivals: list[str] = []
        self._decided_at: EngineSeconds = 0.0
        self._leaderless: list[tuple[Term, EngineSeconds]] = []
        self._release: tuple[int, int] | None = None
        """Fold and wire version of the newest leader."""
        self._releases_seen: list[tuple[Term, tuple[int, int], tuple[int, int]]] = []

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        self._blind = blind
        self._last = state.sequence
        self._fenced_before = state.fenced

    @override
    def read(self, entry: LogEntry) -> None:
        if self._last and entry.sequence != self._last + 1:
            self._missing += entry.sequence - self._last - 1
            if len(self._holes) < EVIDENCE_MAX:
                self._holes.append((self._last + 1, entry.sequence - 1))
        self._first = self._first or entry.sequence
        self._last = entry.sequence
        if entry.event is None:
            self._undecodables += 1
            if len(self._undecodable) < EVIDENCE_MAX:
                self._undecodable.append(f"entry {entry.sequence:,} on {entry.subject}: {entry.problem}")

    @override
    def before(self, event: LogEvent, state: State) -> None:
        if isinstance(event, WritesLost):
            self._lost[event.writer] += event.count
            self._lost_reasons[event.writer] = event.reason
        elif isinstance(event, RequestsRefused):
            self._refused[event.reason] += event.count
            self._refused_for[event.reason] += max(0.0, event.at - event.since)
        elif isinstance(event, LeaderElected):
            self._elect(event, state)
        elif event.stamp is not None:
            self._decided_at = max(self._decided_at, event.at)

    def _elect(self, event: LeaderElected, state: State) -> None:
        known = next((leader for leader in self._leaders if leader.term == event.term), None)
        if known is not None:
            if known.scheduler != event.scheduler:
                self._rivals.append(f"term {event.term}: {known.scheduler} and {event.scheduler}")
            return
        self._changes += state.term > 0
        self._note_release(event)
        if self._decided_at and state.workload.requests:
            self._leaderless.append((event.term, self.wall(event.at - self._decided_at)))
        self._leaders = [*self._leaders, event][-EVIDENCE_MAX:]

    def _note_release(self, event: LeaderElected) -> None:
        release = (int(event.pool.get("fold_version", 1)), event.wire)
        if release != self._release:
            if self._release is not None:
                self._releases_seen.append((event.term, self._release, release))
                del self._releases_seen[:-EVIDENCE_MAX]
            self._release = release

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._incomplete(state)
        yield from self._unreadable()
        yield from self._unapplied(state)
        yield from self._refused_requests()
        yield from self._lost_writes()
        yield from self._leadership(state)
        yield from self._releases()

    def _incomplete(self, state: State) -> Iterator[Finding]:
        if self._blind:
            yield self.note(
                f"what was known before entry {self._first:,} is missing: findings are of what began behind it",
                [
                    f"{name} joined before: its cost model, cache, queue and pace are not known"
                    for name in sorted(state.unregistered)
                ],
                "The recorder's archive reaches as far back as its retention lets it (--from .pointsman/archive.sqlite).",
            )
        if self._missing:
            yield self.serious(
                f"{self._missing:,} entries are missing",
                [f"entries {first:,} to {last:,}" for first, last in self._holes]
                + [f"recorded: {hole}" for hole in self.recorded_holes[:EVIDENCE_MAX]],
                "The recorder found them gone: let the log keep more, and look at what kept the recorder from its database."
                if self.recorded_holes
                else "A stream has no holes: this copy is damaged, or was cut together. Read the live log or the archive.",
            )

    def _unreadable(self) -> Iterator[Finding]:
        if self._undecodables:
            yield self.warning(
                f"{self._undecodables:,} entries do not decode",
                self._undecodable,
                "All processes skip them. Another program or a newer version writes to the pool's subjects, or a "
                f"writer has a defect: `pointsman tap{fleet_as_given()} --since 1 --until now --json SUBJECT` shows the bytes; NATS users with "
                "rights to publish keep others out.",
            )

    def _unapplied(self, state: State) -> Iterator[Finding]:
        letters = state.dead_letters
        if letters.unapplied:
            yield self.serious(
                f"{letters.unapplied:,} entries could not be applied",
                [
                    f"entry {letter.sequence:,}, {letter.what}: {letter.reason}"
                    for letter in letters.newest
                    if letter.decoded
                ][-EVIDENCE_MAX:],
                "The fold has a defect, or an entry is contradictory. All processes skipped it alike; what is "
                "known of the instances and requests in it may be wrong until they join or end. Export this log and report it.",
            )

    def _lost_writes(self) -> Iterator[Finding]:
        if self._lost:
            yield self.serious(
                f"{self._lost.total():,} writes were lost for good",
                [f"{n:,} of {w}: {self._lost_reasons[w]}" for w, n in self._lost.most_common(EVIDENCE_MAX)],
                "The log is incomplete there. Look at nats-server: a full disk, a stream at its bound, or down for long.",
            )

    def _refused_requests(self) -> Iterator[Finding]:
        for reason, count in sorted(self._refused.items()):
            who, advice = REFUSING.get(reason, REFUSING[RejectReason.LOG_OVERLOADED])
            yield self.serious(
                f"{count:,} requests were refused because the {who} did not keep up",
                [f"for {self.wall(self._refused_for[reason]):.0f} s in all; clients got 503 {reason}"],
                advice,
            )

    def _leadership(self, state: State) -> Iterator[Finding]:
        if self._rivals:
            yield self.serious(
                "two schedulers led in one term",
                self._rivals[:EVIDENCE_MAX],
                "The lease did not fence them. Export this log and report it.",
            )
        if self._changes:
            slow = [(term, gap) for term, gap in self._leaderless if gap > LEADERLESS_WALL_SECONDS]
            hours = max(1.0, self.wall(self.time.now - self._leaders[0].at) / 3600)
            often = self._changes > TERMS_A_HOUR_MAX * hours
            yield self.finding(
                Severity.WARNING if slow or often else Severity.NOTE,
                f"the leader changed {times(self._changes)}",
                [f"term {leader.term}: {leader.scheduler}" for leader in self._leaders]
                + [f"before term {term} nothing was decided for {gap:.1f} s" for term, gap in slow[:EVIDENCE_MAX]],
                "Look into the logs of the schedulers for why they ended; a second one (--schedulers 2) shortens the gap.",
            )
        fenced = state.fenced - self._fenced_before
        if fenced:
            yield self.note(
                f"{fenced:,} decisions of deposed leaders came late and were passed over",
                [],
                "That is the fence at work. Their requests were placed again.",
            )

    def _releases(self) -> Iterator[Finding]:
        if not self._releases_seen:
            return
        back = any(later < earlier for _, earlier, later in self._releases_seen)
        refolded = any(later[0] != earlier[0] for _, earlier, later in self._releases_seen)
        yield self.finding(
            Severity.WARNING if back else Severity.NOTE,
            "leaders of other releases took over" + (", also earlier ones" if back else ""),
            [
                f"term {term}: fold version {earlier[0]} to {later[0]}, wire version {earlier[1]} to {later[1]}"
                for term, earlier, later in self._releases_seen
            ],
            (
                "Each folded the whole log at its start, since checkpoints of another fold version are not used. "
                * refolded
            )
            + "Finish the upgrade: releases are mixed for as long as it takes only (docs/upgrades.md).",
        )


class LogDelay(Examiner):
    area = "log"

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        spells = sorted(self.delays.spells, key=lambda spell: spell.noticed - spell.ended)
        if spells:
            yield self.warning(
                f"the log was slow for {self.wall(sum(spell.ended - spell.noticed for spell in spells)):.0f} s",
                [
                    f"for {self.wall(spell.ended - spell.noticed):.0f} s decisions of term {spell.term} took up to "
                    f"{self.wall(spell.longest):.1f} s to come back"
                    for spell in spells[:EVIDENCE_MAX]
                ],
                "Other services learn of everything so late, and the leader suspects no instance meanwhile. Usually the disk of "
                "nats-server; if its latency is well, the leader had too little CPU to read the log.",
                cause=Cause.LOG_SLOW,
            )


class LogSpace(Examiner):
    """Of a log that is still written: `extent` of the whole of it, of which the doctor may read the end only."""

    area = "log"

    def __init__(self, settings: PoolSettings, extent: LogExtent) -> None:
        super().__init__(settings)
        self._extent = extent
        self._entries = 0
        self._first_at: EngineSeconds | None = None

    @override
    def read(self, entry: LogEntry) -> None:
        self._entries += 1
        if self._first_at is None and entry.event is not None:
            self._first_at = entry.event.at

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        extent = self._extent
        if self._first_at is None or not extent.bytes_max or extent.bytes < FULL_SHARE * extent.bytes_max:
            return
        kept = self.wall(self.time.now - self._first_at) * extent.entries / self._entries
        if kept < KEPT_WALL_SECONDS:
            yield self.warning(
                f"the log is full and keeps {kept / 60:.0f} minutes",
                [f"{extent.bytes / 2**20:,.0f} of {extent.bytes_max / 2**20:,.0f} MiB, from entry {extent.first:,} on"],
                "A recorder or scheduler that is away for longer misses entries; `replay` reaches back no further. Raise "
                "--log-bytes-max of the schedulers and restart them: the log grows.",
            )


class LiveFleet(Examiner):
    """A running fleet: whether a scheduler answers, and by its answer whether the log takes writes now, whether any instance is
    there, and whether checkpoints are taken."""

    area = "log"

    def __init__(self, settings: PoolSettings, fleet: FleetDescribed | None, unanswered: str) -> None:
        super().__init__(settings)
        self._fleet = fleet
        self._unanswered = unanswered

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if self._fleet is None:
            yield self.ongoing(
                "no scheduler answers",
                [self._unanswered],
                "Ingresses place requests on the least loaded engine meanwhile, without limits and SLOs. Start a scheduler; "
                "the /readyz of one that runs says why it does not lead.",
            )
            return
        if stalled := stalled_log(self._fleet):
            yield self.ongoing(stalled, ["what follows is only what was written before"], STALLED_ADVICE)
        if not self._fleet.instances and state.scaling.wanted != 0:
            yield self.ongoing(
                "no instance is in the fleet",
                [],
                "Start engines and their workers (pointsman up, pointsman-worker); requests wait up to --hold-seconds and "
                "then get 503.",
            )
        if overdue := self._fleet.checkpoints_overdue:
            yield self.warning(
                "no checkpoints are taken",
                [overdue],
                "Requests do not notice, but a scheduler that starts knows nothing of what the log no longer has: quotas, "
                "drains, learned speeds. The scheduler's log says why: checkpointer_ended (-9: it lacked memory), "
                "checkpoint_not_saved, nats_forbidden.",
            )
