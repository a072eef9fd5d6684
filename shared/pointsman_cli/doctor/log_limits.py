"""Limits of the log: how slowly it took the leader's writes, and how little of the past a full one keeps."""

from collections import deque
from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import EngineSeconds, Sequence, Term
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding

DELAY_WALL_SECONDS = 1.5
"""Half of the default suspect time: from there on a leader suspects nobody."""
SPELL_WALL_SECONDS = 2.0
"""A shorter one may be a leader that stood still."""
EVIDENCE_MAX = 5
WAITING_MAX = 65_536
FULL_SHARE = 0.9
KEPT_WALL_SECONDS = 3600.0


class LogDelay(Examiner):
    """A decision says how far its leader had read (`as_of`): not as far as an own decision that was made long before it
    and is stored by then means that the log took so long. One clock, that of the leader."""

    area = "log"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._term = Term(0)
        self._unread: deque[tuple[Sequence, EngineSeconds]] = deque(maxlen=WAITING_MAX)
        """Decisions of this term that its leader had not read back, oldest first."""
        self._longest: EngineSeconds = 0.0
        self._since: EngineSeconds | None = None
        self._until: EngineSeconds = 0.0
        self._spells: list[tuple[EngineSeconds, EngineSeconds, Term]] = []
        """Length, longest delay, term."""
        self._seconds: EngineSeconds = 0.0

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if event.stamp is None:
            return
        if event.stamp.term != self._term:
            self._end_spell()
            self._term = event.stamp.term
            self._unread.clear()
        while self._unread and self._unread[0][0] <= event.stamp.as_of:
            self._unread.popleft()
        delay = self.wall(event.at - self._unread[0][1]) if self._unread else 0.0
        if delay >= DELAY_WALL_SECONDS:
            self._since = event.at if self._since is None else self._since
            self._until, self._longest = event.at, max(self._longest, delay)
        else:
            self._end_spell()
        self._unread.append((state.sequence, event.at))

    def _end_spell(self) -> None:
        if self._since is not None and (length := self.wall(self._until - self._since)) >= SPELL_WALL_SECONDS:
            self._seconds += length
            longest = [*self._spells, (length, self._longest, self._term)]
            self._spells = sorted(longest, reverse=True)[:EVIDENCE_MAX]
        self._since, self._longest = None, 0.0

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        self._end_spell()
        if self._spells:
            yield self.warning(
                f"the log was slow for {self._seconds:.0f} s",
                [
                    f"for {length:.0f} s decisions of term {term} took up to {longest:.1f} s to come back"
                    for length, longest, term in self._spells
                ],
                "Other services learn of everything so late, and the leader suspects no instance meanwhile. Usually the disk of "
                "nats-server; if its latency is well, the leader had too little CPU to read the log.",
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
