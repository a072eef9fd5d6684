"""Limits of the log: how slowly it took the leader's writes, and how little of the past a full one keeps."""

from collections.abc import Iterator

from typing_extensions import override

from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import EngineSeconds
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.explain.causes import Cause

EVIDENCE_MAX = 5
FULL_SHARE = 0.9
KEPT_WALL_SECONDS = 3600.0


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
