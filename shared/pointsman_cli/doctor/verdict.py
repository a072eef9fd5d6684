"""One line about a log: what was wrong, and its likeliest cause."""

from pointsman_cli.doctor.examination import Diagnosis
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural

ROOTS_FIRST = ("log", "clocks", "fleet", "caches", "engines")
"""Areas whose findings explain those of others of the same severity."""


def verdict(diagnosis: Diagnosis) -> str:
    """Faults that cost requests or events, then why requests were late; else the most severe finding."""
    wrong = [f for f in diagnosis.findings if f.severity is not Severity.NOTE]
    if not diagnosis.entries and not wrong:
        return "nothing was examined: the log has no entry there"
    if not wrong:
        notes = len(diagnosis.findings)
        return "nothing to complain about" + (f"; {plural(notes, 'note')} below" if notes else "")
    lateness = next((f for f in wrong if f.area == "service" and f.cause is not None), None)
    others = sorted((f for f in wrong if f is not lateness), key=_rank)
    if lateness is None:
        return others[0].what
    fault = next(
        (f for f in others if f.severity is Severity.SERIOUS and f.area in ROOTS_FIRST and f.cause is None), None
    )
    root = next((f for f in others if f.cause is lateness.cause), None)
    return ": ".join(
        text
        for text in ("; ".join(f.what for f in (fault, lateness) if f), root.what if root is not None else "")
        if text
    )


def _rank(finding: Finding) -> tuple[bool, bool, bool, bool, int]:
    """What goes on comes first. An emptied cache makes its engine look slow, so it comes next. Else by severity; of the
    same one, what explains lateness, then what explains other findings."""
    place = ROOTS_FIRST.index(finding.area) if finding.area in ROOTS_FIRST else len(ROOTS_FIRST)
    stale = finding.cause is Cause.STALE_INDEX
    return not finding.ongoing, not stale, finding.severity is not Severity.SERIOUS, finding.cause is None, place
