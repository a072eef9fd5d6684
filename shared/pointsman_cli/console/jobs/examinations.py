"""What `doctor` says of a log, as a view."""

import time

import msgspec

from pointsman_cli.console.jobs.views import DoctorView, FindingView
from pointsman_cli.doctor.command import examiners_of
from pointsman_cli.doctor.examination import examine
from pointsman_cli.doctor.verdict import verdict
from pointsman_cli.history.sources import History
from pointsman_cli.history.start_point import StartPoint, beginning_of
from pointsman_cli.terminal import wall_time

ENTRIES_MAX = 300_000
"""Of a log with checkpoints about so much is examined; `pointsman doctor` reads all."""


def examination_of(history: History) -> DoctorView:
    """Raises HistoryError."""
    started = time.monotonic()
    settings, beginning = history.settings, _beginning(history)
    entries = history.entries(beginning.start)
    diagnosis = examine(entries, settings, examiners_of(history), beginning)
    first, last = (wall_time(at, settings.speed).timestamp() for at in (diagnosis.first_at, diagnosis.last_at))
    return DoctorView(
        state="done",
        at=time.time(),
        took_seconds=round(time.monotonic() - started, 1),
        entries=diagnosis.entries,
        first_at=first,
        last_at=last,
        verdict=verdict(diagnosis),
        summary=[*([beginning.note] if beginning.note else []), *diagnosis.summary],
        findings=msgspec.convert(diagnosis.findings, list[FindingView], from_attributes=True),
    )


def _beginning(history: History) -> StartPoint:
    since = history.header.last - ENTRIES_MAX
    known = history.known_before(since) if since > 0 else None
    if known is None:
        return beginning_of(history)
    return StartPoint(
        known, f"examined from entry {known.state.sequence + 1:,} on; `pointsman doctor` reads the whole log"
    )
