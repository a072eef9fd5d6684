"""`pointsman doctor`: one reading, and what is wrong."""

import sys
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
from rich.console import Console

from pointsman.runtime.telemetry import configure_logging
from pointsman.state.state import PoolSettings
from pointsman_cli.doctor.balance import Balance
from pointsman_cli.doctor.caches import Caches
from pointsman_cli.doctor.clocks import Clocks
from pointsman_cli.doctor.engine_failures import EngineFailures
from pointsman_cli.doctor.examination import Diagnosis, Examiner, examine
from pointsman_cli.doctor.findings import Finding, Severity, number
from pointsman_cli.doctor.fleet_health import FleetHealth
from pointsman_cli.doctor.log_health import LogHealth
from pointsman_cli.doctor.predictions import Predictions
from pointsman_cli.doctor.requests import Requests
from pointsman_cli.doctor.service import Service
from pointsman_cli.history.output import STANDARD_OUTPUT, console_for, json_option, progress_console, write_json
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import Source, source_options
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.terminal import wall_time

SERIOUS_EXIT_CODE = 1
EXAMINERS: tuple[type[Examiner], ...] = (
    LogHealth,
    Requests,
    Service,
    FleetHealth,
    EngineFailures,
    Caches,
    Predictions,
    Balance,
    Clocks,
)
STYLES = {Severity.SERIOUS: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@source_options
@json_option
def doctor_command(source: Source, json_file: Path | None) -> None:
    """Read a log and list what is wrong in it, worst first, with evidence and what to do.

    \b
      pointsman doctor                                        the running fleet's log, up to now
      pointsman doctor --from incident.pmlog                  an exported bundle
      pointsman doctor --from .pointsman/archive.sqlite --json - | jq '.findings[] | select(.severity == "serious")'

    It looks at the log itself (holes, lost writes, leaders), at requests (without an end, failed, rejected), service
    (in time by instance, tenant, length and prefix), instances (silent, gone, flapping), caches (gaps, doubts, wrong
    keys), predictions (bias, slow engines, missed hits), balance, and clocks (skew, late events). Times are the wall's
    seconds where machines are meant, and engine seconds where requests are. Exit codes: 1 something is serious, 2 no log.
    """
    configure_logging("error", "text")
    console = console_for(json_file)
    with source.open() as history:
        settings = history.settings
        beginning = beginning_of(history)
        entries = shown(history, progress_console(), "examining", beginning.start)
        diagnosis = examine(entries, settings, [examiner(settings) for examiner in EXAMINERS], beginning)
        if json_file:
            told = {"origin": history.origin, "beginning": beginning.note, "pointsman": version("pointsman")}
            write_json(json_file, told | msgspec.to_builtins(diagnosis))
        if json_file is None or str(json_file) != STANDARD_OUTPUT:
            console.print(history.origin, style="dim", markup=False, soft_wrap=True)
            if beginning.note:
                console.print(beginning.note, style="yellow", markup=False, soft_wrap=True)
            _show(console, diagnosis, settings)
    serious = any(finding.severity is Severity.SERIOUS for finding in diagnosis.findings)
    sys.exit(SERIOUS_EXIT_CODE if serious else 0)


def _show(console: Console, diagnosis: Diagnosis, settings: PoolSettings) -> None:
    begun, ended = (wall_time(at, settings.speed) for at in (diagnosis.first_at, diagnosis.last_at))
    span = f", {begun:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S}" if diagnosis.entries else ""
    console.print(f"{diagnosis.entries:,} entries{span}")
    for said in diagnosis.summary:
        console.print(said, markup=False, soft_wrap=True)
    console.print()
    for finding in diagnosis.findings:
        _show_finding(console, finding)
    console.print(_verdict(diagnosis), style="bold")


def _show_finding(console: Console, finding: Finding) -> None:
    console.print(
        f"{finding.severity}  {finding.area}: {finding.what}",
        style=STYLES[finding.severity],
        markup=False,
        soft_wrap=True,
    )
    for said in finding.evidence:
        console.print(f"    {said}", markup=False, soft_wrap=True)
    if finding.advice:
        console.print(f"  > {finding.advice}", markup=False, soft_wrap=True)
    console.print()


def _verdict(diagnosis: Diagnosis) -> str:
    counts = {severity: sum(f.severity is severity for f in diagnosis.findings) for severity in Severity}
    if not counts[Severity.SERIOUS] and not counts[Severity.WARNING]:
        notes = counts[Severity.NOTE]
        return "nothing to complain about" + (f"; {number(notes, 'note')} above" if notes else "")
    return f"{counts[Severity.SERIOUS]} serious, {number(counts[Severity.WARNING], 'warning')}, {number(counts[Severity.NOTE], 'note')}"
