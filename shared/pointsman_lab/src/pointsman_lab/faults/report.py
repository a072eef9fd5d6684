"""The report of a run as text and JSON."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.primitives import EngineSeconds
from pointsman_cli.terminal import table
from pointsman_lab.faults.bad_engines import FIRST_SECONDS, Touched
from pointsman_lab.faults.checks import unanswered
from pointsman_lab.faults.injector import Injection
from pointsman_lab.faults.observations import Evidence

BLIND = "blind"

Column = tuple[str, Callable[[Injection], str]]


def _seconds(value: EngineSeconds | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _lasted(injection: Injection) -> str:
    return f"{injection.lasted:.1f} s" if injection.lasted else ""


COLUMNS: tuple[Column, ...] = (
    ("lasted", _lasted),
    ("served again", lambda injection: _seconds(injection.served_s)),
    ("normal again", lambda injection: _seconds(injection.normal_s)),
    ("all well again", lambda injection: _seconds(injection.well_s)),
    ("streams cut", lambda injection: str(injection.streams_cut) if injection.streams_cut else ""),
)
BALANCED_COLUMNS: tuple[Column, ...] = (
    ("lasted", _lasted),
    ("all well again", lambda injection: _seconds(injection.well_s)),
    ("answers", lambda injection: f"{injection.answered:,}"),
    ("TTFT P99", lambda injection: _seconds(injection.ttft_p99_s)),
    ("streams cut", lambda injection: str(injection.streams_cut)),
    (
        "not 200",
        lambda injection: ", ".join(f"{count} x {status}" for status, count in injection.statuses.items()) or "0",
    ),
    (
        "out of rotation",
        lambda injection: ", ".join(f"{name} {s:.1f} s" for name, s in injection.out_of_rotation.items()),
    ),
)


class FaultsReport(msgspec.Struct, kw_only=True):
    """The JSON report. Times are wall seconds. `findings`: of each check, empty where it holds. `lost`: requests
    without a result for the client or without an end in the log. `doubled`: duplicate ends and grants."""

    seed: int
    workload: str
    requests: int
    wall_s: EngineSeconds
    endings: dict[str, int]
    details: dict[str, int]
    blind: int
    lost: int
    doubled: int
    decisions: int
    entries: int
    terms: int
    quiet_s: EngineSeconds | None
    balanced: bool
    busy_share: float
    injections: list[Injection]
    findings: dict[str, list[str]]

    @property
    def ok(self) -> bool:
        return not any(self.findings.values())


def reported(
    evidence: Evidence,
    findings: dict[str, list[str]],
    *,
    seed: int,
    workload: str,
    wall_s: EngineSeconds,
    busy_share: float,
) -> FaultsReport:
    exchanges = evidence.exchanges
    decided = [e.event for e in evidence.entries if e.event is not None and e.event.stamp is not None]
    return FaultsReport(
        seed=seed,
        workload=workload,
        requests=len(exchanges),
        wall_s=wall_s,
        endings=dict(Counter(e.ending for e in exchanges).most_common()),
        details=dict(Counter(f"{e.ending}: {e.detail}" for e in exchanges if e.detail).most_common()),
        blind=sum(e.knowledge == BLIND for e in exchanges),
        lost=len(unanswered(evidence)) + sum("without" in f for f in _ends(findings)),
        doubled=len(findings["no request ran twice"]) + sum("without" not in f for f in _ends(findings)),
        decisions=len(decided),
        entries=len(evidence.entries),
        terms=evidence.state.term,
        quiet_s=evidence.quiet_s,
        balanced=evidence.balancer is not None,
        busy_share=busy_share,
        injections=evidence.injections,
        findings=findings,
    )


def _ends(findings: dict[str, list[str]]) -> list[str]:
    return findings["every request has one end"]


def show(console: Console, report: FaultsReport) -> None:
    console.print(_injections(report.injections, BALANCED_COLUMNS if report.balanced else COLUMNS))
    for injection in report.injections:
        if injection.touched is not None:
            _show_touched(console, injection.fault, injection.touched)
    endings = ", ".join(f"{count:,} {ending}" for ending, count in report.endings.items())
    console.print(f"{report.requests:,} requests in {report.wall_s:.0f} s: {endings}; {report.blind:,} placed blind")
    for detail, count in report.details.items():
        console.print(f"  {count:>5}  {detail}", style="dim", markup=False, soft_wrap=True)
    quiet = "never" if report.quiet_s is None else f"after {report.quiet_s:.1f} s"
    console.print(
        f"{report.entries:,} log entries, {report.decisions:,} decisions, {report.terms} terms; quiet {quiet}; "
        f"cores {report.busy_share:.0%} busy"
    )
    console.print(_findings(report.findings))
    for name, found in report.findings.items():
        for sentence in found:
            console.print(Text(f"{name}: {sentence}", style="red"), soft_wrap=True)
    verdict = f"{report.lost} lost, {report.doubled} doubled; seed {report.seed}"
    console.print(Text(verdict, style="bold green" if report.ok else "bold red"))


def _injections(injections: list[Injection], columns: Sequence[Column]) -> Table:
    made = table("at", "fault", "process", *(f">{heading}" for heading, _ in columns))
    for injection in sorted(injections, key=lambda one: one.began):
        cells = [cell(injection) for _, cell in columns]
        made.add_row(f"{injection.began:.1f} s", injection.fault, injection.victim, *cells)
    return made


def progress_line(injection: Injection) -> str:
    well = (
        f"not well again ({injection.unwell})" if injection.well_s is None else f"well after {injection.well_s:.1f} s"
    )
    return f"  {injection.began:6.1f} s  {injection.fault} of {injection.victim}: {well}"


def _show_touched(console: Console, fault: str, touched: Touched) -> None:
    failures = ", ".join(f"{count} {failure}" for failure, count in touched.failures.items()) or "none"
    console.print(
        f"{fault} of {touched.instance}: sent there in the first {FIRST_SECONDS:g} s {touched.early}, then "
        f"{touched.touched} of {touched.asked} ({touched.share:.1%}); failures there: {failures}; whole again "
        f"{_seconds(touched.whole_s)} and served there {_seconds(touched.back_s)} after it was well",
        markup=False,
        soft_wrap=True,
    )
    for command in ("doctor", "explain"):
        console.print(
            f"  {command}: {getattr(touched, command) or 'does not name it'}", style="dim", markup=False, soft_wrap=True
        )


def _findings(findings: dict[str, list[str]]) -> Table:
    made = table("what must hold", "")
    for name, found in findings.items():
        made.add_row(
            name, Text(f"no, {len(found)} findings", style="bold red") if found else Text("yes", style="green")
        )
    return made
