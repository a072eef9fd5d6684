"""`pointsman doctor`: runs all examiners over a log and prints their findings."""

import sys
from importlib.metadata import version

import click
import msgspec
from rich.console import Console

from pointsman.state.state import PoolSettings
from pointsman_cli.doctor.admin_actions import AdminActions
from pointsman_cli.doctor.balance import Balance
from pointsman_cli.doctor.caches import Caches, EmptiedCaches
from pointsman_cli.doctor.clocks import Clocks
from pointsman_cli.doctor.engine_failures import EngineFailures, MissingTransfers
from pointsman_cli.doctor.examination import Diagnosis, Examiner, examine
from pointsman_cli.doctor.findings import Severity
from pointsman_cli.doctor.fleet_health import FleetHealth, FleetSize
from pointsman_cli.doctor.isolation import Isolation
from pointsman_cli.doctor.lateness import Lateness
from pointsman_cli.doctor.log_health import LiveFleet, LogDelay, LogHealth, LogSpace
from pointsman_cli.doctor.predictions import Predictions
from pointsman_cli.doctor.requests import Requests
from pointsman_cli.doctor.service import Service
from pointsman_cli.doctor.slow_engines import SlowEngines
from pointsman_cli.doctor.verdict import verdict
from pointsman_cli.formatting import plural
from pointsman_cli.history.progress import shown
from pointsman_cli.history.sources import History, open_history
from pointsman_cli.history.start_point import beginning_at
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.options import CONTEXT, from_options, json_switch, since_option
from pointsman_cli.output_file import print_json
from pointsman_cli.terminal import output_console, say, wall_span

SERIOUS_EXIT_CODE = 1
EXAMINERS: tuple[type[Examiner], ...] = (
    LogHealth,
    LogDelay,
    Requests,
    Lateness,
    Service,
    FleetHealth,
    FleetSize,
    EngineFailures,
    Caches,
    EmptiedCaches,
    MissingTransfers,
    SlowEngines,
    Predictions,
    Balance,
    Clocks,
    Isolation,
    AdminActions,
)
STYLES = {Severity.SERIOUS: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


@click.command("doctor", context_settings=CONTEXT)
@from_options
@since_option
@json_switch
def doctor_command(place: str | None, pool: str | None, since: str | None, as_json: bool) -> None:
    """Find problems in a log: findings with evidence and advice, most severe first.

    \b
      pointsman doctor                                        the running fleet's log, up to now
      pointsman doctor --since 07:30                          what happened since then: a full log takes many minutes
      pointsman doctor --from incident.pmlog                  an exported bundle
      pointsman doctor --from .pointsman/archive.sqlite --json | jq '.findings[] | select(.severity == "serious")'

    Checks the log (holes, lost writes, slow, full, leaders), requests (unended, failed, rejected), SLO attainment (by instance, tenant,
    length and prefix), instances (silent, gone, flapping, too few), caches (gaps, unverified, wrong keys), predictions (bias, slow
    engines, missed hits), balance, clocks (skew, late events), and isolation of cache groups. Lists admin actions. Machine
    times are wall seconds, request times engine seconds. Exit codes: 1 a serious finding, 2 no log.
    """
    with open_history(place, pool) as history:
        settings = history.settings
        beginning = beginning_at(history, moment_in(history, since, begins=True))
        entries = shown(history, "examining", beginning.start)
        examiners = examiners_of(history)
        if history.fleet is not None or history.unanswered:
            examiners.insert(0, LiveFleet(settings, history.fleet, history.unanswered))
        diagnosis = examine(entries, settings, examiners, beginning)
        if as_json:
            about = {"origin": history.origin, "beginning": beginning.note, "pointsman": version("pointsman")}
            print_json(about | {"verdict": verdict(diagnosis)} | msgspec.to_builtins(diagnosis))
        else:
            console = output_console()
            say(console, history.origin, "dim")
            if beginning.note:
                say(console, beginning.note, "yellow")
            _show(console, diagnosis, settings)
    serious = any(finding.severity is Severity.SERIOUS for finding in diagnosis.findings)
    sys.exit(SERIOUS_EXIT_CODE if serious else 0)


def examiners_of(history: History) -> list[Examiner]:
    settings = history.settings
    examiners = [examiner(settings) for examiner in EXAMINERS]
    for examiner in examiners:
        if isinstance(examiner, LogHealth):
            examiner.recorded_holes = history.holes
    if history.extent is not None:
        examiners.append(LogSpace(settings, history.extent))
    return examiners


def _show(console: Console, diagnosis: Diagnosis, settings: PoolSettings) -> None:
    say(console, verdict(diagnosis), "bold")
    span = f", {wall_span(diagnosis.first_at, diagnosis.last_at, settings.speed)}" if diagnosis.entries else ""
    say(console, f"{diagnosis.entries:,} entries{span}")
    for line in (*diagnosis.summary, ""):
        say(console, line)
    for finding in diagnosis.findings:
        say(console, f"{finding.severity}  {finding.area}: {finding.what}", STYLES[finding.severity])
        for line in finding.evidence:
            say(console, f"    {line}")
        if finding.advice:
            say(console, f"  > {finding.advice}")
        say(console, "")
    if any(finding.severity is not Severity.NOTE for finding in diagnosis.findings):
        say(console, _counted(diagnosis), "bold")


def _counted(diagnosis: Diagnosis) -> str:
    counts = {severity: sum(f.severity is severity for f in diagnosis.findings) for severity in Severity}
    return f"{counts[Severity.SERIOUS]} serious, {plural(counts[Severity.WARNING], 'warning')}, {plural(counts[Severity.NOTE], 'note')}"
