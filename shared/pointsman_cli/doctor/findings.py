"""The result of an examiner: severity, area, evidence, advice."""

from dataclasses import dataclass, field
from enum import StrEnum

from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural


class Severity(StrEnum):
    """`serious`: requests or events were lost, or most requests were late."""

    SERIOUS = "serious"
    WARNING = "warning"
    NOTE = "note"


WORST_FIRST = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    severity: Severity
    area: str
    what: str
    evidence: list[str] = field(default_factory=list)
    advice: str = ""
    cause: Cause | None = None
    """Of slow requests, if this finding explains them."""
    ongoing: bool = False
    """Serious, and not over at the end of the log."""


def times(count: int) -> str:
    return "once" if count == 1 else plural(count, "time")


def in_order(findings: list[Finding]) -> list[Finding]:
    """Ongoing ones first, then by severity."""
    return sorted(findings, key=lambda finding: (not finding.ongoing, WORST_FIRST.index(finding.severity)))
