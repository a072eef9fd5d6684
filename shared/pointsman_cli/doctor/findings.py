"""The result of an examiner: severity, subject, evidence, advice."""

from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """`serious`: requests or knowledge are lost, or most requests late. `note`: nothing to be done."""

    SERIOUS = "serious"
    WARNING = "warning"
    NOTE = "note"


WORST_FIRST = tuple(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One anomaly. `area` is the subject of the examiner that found it."""

    severity: Severity
    area: str
    what: str
    evidence: list[str] = field(default_factory=list)
    advice: str = ""


def number(count: int, what: str) -> str:
    """`1 note`, `2 notes`."""
    return f"{count:,} {what}" + "s" * (count != 1)


def times(count: int) -> str:
    """`once`, `2 times`."""
    return "once" if count == 1 else number(count, "time")


def in_order(findings: list[Finding]) -> list[Finding]:
    """Worst first."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity))
