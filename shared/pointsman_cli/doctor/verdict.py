"""One line about a log: what was wrong, and its likeliest cause."""

from pointsman_cli.doctor.examination import Diagnosis
from pointsman_cli.doctor.findings import Finding, Severity, number

ROOTS_FIRST = ("log", "clocks", "fleet", "caches", "engines")
"""Areas whose findings explain those of others of the same severity."""


def verdict(diagnosis: Diagnosis) -> str:
    """The finding that explains most: the cause of late requests if there is one, else the most severe."""
    wrong = [f for f in diagnosis.findings if f.severity is not Severity.NOTE]
    if not wrong:
        notes = len(diagnosis.findings)
        return "nothing to complain about" + (f"; {number(notes, 'note')} below" if notes else "")
    lateness = next((f for f in wrong if f.area == "service" and f.cause is not None), None)
    same = [f for f in wrong if f.cause is not None and f is not lateness]
    if lateness is not None:
        root = next((f for f in same if f.cause is lateness.cause), None)
        return f"{lateness.what}: {root.what}" if root is not None else lateness.what
    return min(same or wrong, key=_rank).what


def _rank(finding: Finding) -> tuple[bool, int]:
    place = ROOTS_FIRST.index(finding.area) if finding.area in ROOTS_FIRST else len(ROOTS_FIRST)
    return finding.severity is not Severity.SERIOUS, place
